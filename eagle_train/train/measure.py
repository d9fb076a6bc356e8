"""`python -m eagle_train measure`: decode prompts with a draft head and without; report what was accepted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_train.bundled import DEMO, DEMO_NAME, target_path
from eagle_train.config import TrainConfig
from eagle_train.config_checks import ISOLATED
from eagle_train.config_measure import MeasureConfig
from eagle_train.decode.chain import decode_plain, measure_acceptance
from eagle_train.decode.check import (
    check_pair,
    check_prompts,
    draft_aux_layer_ids,
    is_embedding_of,
    split_long_prompts,
)
from eagle_train.decode.figures import count_different, group_figures
from eagle_train.decode.plots import check_parent, check_plot, draw_acceptance, save_figure
from eagle_train.decode.prompts import PromptReport, read_prompts
from eagle_train.decode.results import Prompt, PromptResult, answer_samples
from eagle_train.errors import InputError
from eagle_train.export.record import RunRecord, read_run_record
from eagle_train.files import write_json
from eagle_train.flags import parse
from eagle_train.model.checkpoint import draft_head_of
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.layouts import read_stored_head
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_config import read_target_config
from eagle_train.train.evaluate import evaluate, evaluate_sampled
from eagle_train.train.measure_report import Expected, Measurement, Speed, as_json, format_measurement
from eagle_train.train.output import RUN_CONFIG
from eagle_train.train.prepare import (
    check_tokenizer,
    choose_device,
    choose_dtype,
    load_tokenizer,
    open_target,
)
from eagle_train.train.threads import set_num_threads

WALK_GRANULARITY = 64  # tokens; lengths of the chain walk's batches, which run eager
WARM_TOKENS = 8  # decoded before the clock runs
ANY_LAYERS = (0, 1, 2)  # read until the target is known to have the draft's


def measure(options: MeasureConfig) -> None:
    """Load, decode, and report. Raises InputError for a pair that does not belong together, for prompts that
    cannot be read or do not fit, and for options that cannot be met.
    """
    if options.json is not None:
        check_parent("--json", Path(options.json))
    if options.plot is not None:
        check_plot("--plot", Path(options.plot))
    set_num_threads(options.num_threads)
    stored = read_stored_head(options.draft)
    head = draft_head_of(stored)
    run = with_run_options(options)
    options = replace(options, target=run.target)
    record = read_run_record(stored.directory)
    target, prompts, report = open_target_and_prompts(options, run, record)
    check_pair(target, head)
    prompts, report = fitting_prompts(options, target, prompts, report)
    own_VH = stored.tensors.get("embed_tokens.weight")
    if own_VH is not None and not is_embedding_of(target, own_VH):
        raise InputError(
            f"--draft {options.draft} has an embed_tokens.weight that is not the target's; engines "
            "draft with it, and here the target's is used, so the figures would be another head's. Name the "
            "target that it was trained for, or measure it in an engine"
        )
    target.aux_layer_ids = draft_aux_layer_ids(target, head)
    if fault := record.layers_fault(target.aux_layer_ids):
        raise InputError(f"--draft {options.draft}: {fault}; use the target that the draft was trained for")
    head.to(target.device)
    measurement = measure_prompts(options, target, head, prompts)
    print(format_measurement(options, target, report, len(prompts), measurement))
    if options.json is not None:
        write_json(Path(options.json), as_json(options, target, report, measurement))
    if options.plot is not None:
        figure = draw_acceptance(measurement.groups, measurement.expected.shares())
        save_figure(figure, Path(options.plot))


def open_target_and_prompts(
    options: MeasureConfig, run: TrainConfig, record: RunRecord
) -> tuple[FrozenTarget, list[Prompt], PromptReport]:
    """What the head is measured with; cheap checks first. run: from `with_run_options`; record:
    beside the head.
    """
    assert run.target is not None
    is_demo = run.target == DEMO_NAME
    name = target_path(run.target)
    paths = options.prompts or ((str(DEMO / "heldout.jsonl"),) if is_demo else ())
    if not paths:
        raise InputError("no prompts; name a JSONL file with --prompts")
    read_target_config(name, options.trust_remote_code)  # says clearly what is not there
    tokenizer = load_tokenizer(name, run)
    check_tokenizer(f"--draft {options.draft}", record, run.target, tokenizer)
    prompts, report = read_prompts(
        paths,
        tokenizer,
        template_options=run.parsed_template_options(),
        max_prompts=options.max_prompts,
    )
    device = choose_device(options.device)
    target = open_target(name, run, device, choose_dtype(options.dtype, device), ANY_LAYERS)
    assert isinstance(target, FrozenTarget)
    return target, prompts, report


def fitting_prompts(
    options: MeasureConfig, target: FrozenTarget, prompts: list[Prompt], report: PromptReport
) -> tuple[list[Prompt], PromptReport]:
    """The prompts that the target can answer in full; --on_long_prompt says whether others are refused."""
    if options.on_long_prompt == "skip":
        prompts, too_long = split_long_prompts(target, prompts, options.max_new_tokens)
        report = replace(report, long_prompts_left_out=len(too_long))
        if not prompts:
            raise InputError(
                f"none of {len(too_long):,} prompts is left: with --max_new_tokens {options.max_new_tokens} "
                "each exceeds the target's context; lower it, or name shorter prompts"
            )
    check_prompts(target, prompts, options.max_new_tokens, remedy=", or leave it out: --on_long_prompt skip")
    return prompts, report


def with_run_options(options: MeasureConfig) -> TrainConfig:
    """Under the given options, those of the run that the draft comes from, if it is one of ours: its target,
    its attention and its chat template, because prompts must be read as they were in training.
    """
    path, saved = Path(options.draft) / RUN_CONFIG, saved_run_options(options.draft)
    target = options.target
    if target is None and saved is not None and not saved.mock_target:
        target = saved.target or DEMO_NAME
    if target is None:
        raise InputError(
            f"--target is not named, and {path} names none; name the model that the draft was trained for"
        )
    attention = saved.attn_implementation if saved else ISOLATED
    return TrainConfig(
        target=target,
        packing="none",
        padding_free=attention == ISOLATED,
        attn_implementation=attention,
        trust_remote_code=options.trust_remote_code,
        chat_template=options.chat_template or (saved.chat_template if saved else None),
        template_options=options.template_options or (saved.template_options if saved else ()),
    )


def saved_run_options(draft: str) -> TrainConfig | None:
    """The options of the run that a draft comes from, if it is one of ours."""
    path = Path(draft) / RUN_CONFIG
    if not path.is_file():
        return None
    return parse(TrainConfig, ["--config", str(path)], command="measure", description="")


def measure_prompts(
    options: MeasureConfig, target: FrozenTarget, head: Eagle3DraftHead, prompts: Sequence[Prompt]
) -> Measurement:
    """Decode with the draft; without it under --compare_plain; walk the answers."""

    def decode(some: Sequence[Prompt], max_new_tokens: int) -> list[PromptResult]:
        return measure_acceptance(
            target,
            head,
            some,
            num_speculative_tokens=options.num_speculative_tokens,
            max_new_tokens=max_new_tokens,
            batch_size=options.batch_size,
            temperature=options.temperature,
            proposal=options.proposal,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
        )

    def decode_without(some: Sequence[Prompt], max_new_tokens: int) -> list[PromptResult]:
        return decode_plain(
            target,
            some,
            max_new_tokens=max_new_tokens,
            batch_size=options.batch_size,
            temperature=options.temperature,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
        )

    results, seconds = timed(decode, prompts, options.max_new_tokens)
    plain, plain_seconds = None, None
    if options.compare_plain:
        plain, plain_seconds = timed(decode_without, prompts, options.max_new_tokens)
    is_greedy = options.temperature == 0
    return Measurement(
        groups=group_figures(results, seed=options.seed),
        expected=expected_acceptance(options, target, head, prompts, results),
        speed=Speed(
            count_tokens(results), seconds, None if plain is None else count_tokens(plain), plain_seconds
        ),
        num_different=count_different(results, plain) if plain is not None and is_greedy else None,
    )


def timed(
    decode: Callable[[Sequence[Prompt], int], list[PromptResult]],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> tuple[list[PromptResult], float]:
    """Results of decoding, and its seconds; what a process does once is done before."""
    decode(prompts[:1], min(WARM_TOKENS, max_new_tokens))
    start = time.perf_counter()
    results = decode(prompts, max_new_tokens)
    return results, time.perf_counter() - start


def count_tokens(results: Sequence[PromptResult]) -> int:
    return sum(len(result.token_ids) for result in results)


def expected_acceptance(
    options: MeasureConfig,
    target: FrozenTarget,
    head: Eagle3DraftHead,
    prompts: Sequence[Prompt],
    results: Sequence[PromptResult],
) -> Expected:
    """The chain walk, by teacher forcing, over the answers that were decoded."""
    samples = answer_samples(prompts, results)
    n = options.num_speculative_tokens
    longest, padding_free = max(map(len, samples)), target.isolates_documents
    if options.temperature:
        counts = evaluate_sampled(
            head,
            target,
            samples,
            num_speculative_tokens=n,
            temperature=options.temperature,
            samples_proposal=options.proposal == "sampled",
            training_seq_len=longest,
            bucket_granularity=WALK_GRANULARITY,
            padding_free=padding_free,
            batch_size=options.batch_size,
        )
        return Expected(counts.acceptance_length, counts.steps, counts.accepted_per_position.tolist())
    metrics = evaluate(
        head,
        target,
        samples,
        ttt_steps=n,
        training_seq_len=longest,
        bucket_granularity=WALK_GRANULARITY,
        padding_free=padding_free,
        batch_size=options.batch_size,
    )
    return Expected(
        metrics["acceptance_length"][str(n)],
        metrics["verify_steps"][str(n)],
        metrics["accepted_per_position"][str(n)],
    )
