"""The model card beside the weights: what the head was trained on, how well it drafts, how it is served."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from eagle_train.export.engines import (
    IN_PYTHON,
    TARGET_WORD,
    Served,
    full_path,
    num_drafted,
    serve_command,
    steps,
)
from eagle_train.export.findings import (
    BY_SOURCE,
    ENGINES,
    LLAMACPP,
    NEVER_RUN,
    OPENVINO,
    SGLANG,
    TENSORRT,
    VLLM,
)
from eagle_train.export.record import SHOWN_OPTIONS, RunRecord, read_run_record
from eagle_train.files import write_atomically
from eagle_train.model.layouts import OFFICIAL, aux_layer_ids, read_config_json

CARD = "README.md"
SPECULATORS_FORMAT = "speculators"


def write_model_card(directory: str | Path) -> Path:
    """Write the card of a finished training into its output directory, from what lies there; returns its
    path.

    Raises InputError where the head's config or the record cannot be read.
    """
    directory = Path(directory)
    record, flat = read_run_record(directory), read_config_json(directory)
    explicit = aux_layer_ids(flat)
    served = Served(
        draft=full_path(str(directory)),
        target=full_path(record.target or TARGET_WORD),
        layout=OFFICIAL,
        dtype=flat.get("torch_dtype", "float32"),
        aux_layer_ids=explicit or record.options.get("aux_layer_ids"),
        is_default=explicit is None,
        num_drafted=num_drafted(record.options.get("ttt_steps")),
    )
    text = model_card(served, flat["draft_vocab_size"], flat["vocab_size"], record, None)
    path = directory / CARD
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path


def model_card(
    head: Served, draft_vocab_size: int, vocab_size: int, record: RunRecord, engine: str | None
) -> str:
    """The card as Markdown. engine: the one that the directory was exported for; None: a training's own."""
    is_local = head.target == TARGET_WORD or Path(head.target).is_dir()
    front = [
        "---",
        *([] if is_local else [f"base_model: {head.target}"]),
        "tags: [eagle3, speculative-decoding]",
    ]
    layers = ", ".join(map(str, head.aux_layer_ids)) if head.aux_layer_ids else "the default (2, L//2, L-3)"
    facts = {
        "target": head.target if head.target != TARGET_WORD else "not recorded",
        "algorithm": f"EAGLE-3 (one Llama layer){', trained with eagle_train' * record.is_ours}",
        "aux layers": f"{layers} (the states that enter these layers)",
        "draft vocabulary": f"{draft_vocab_size:,} of {vocab_size:,} tokens",
        "weights": f"safetensors, {head.dtype}, {head.layout} layout",
    }
    if length := record.options.get("training_seq_len"):
        facts["trained length"] = f"documents of up to {length:,} tokens; the position limit is the target's"
    sections = [
        "\n".join([*front, "---"]),
        "# Draft head for speculative decoding",
        _table(["", ""], [[name, value] for name, value in facts.items()]),
        *_training(record),
        *_acceptance(record),
        *(["## Serving", "Not for serving: it was trained on random tokens."] if record.is_mock else []),
        *([] if record.is_mock else ["## Serving", *serving(head, engine)]),
        "## Licence",
        "Not stated by the trainer. Choose one that the target's licence and the data's terms allow, and "
        "name it here.",
    ]
    return "\n\n".join(sections) + "\n"


def _training(record: RunRecord) -> list[str]:
    if not record.is_ours:
        return []
    options, start = record.options, record.last("start")
    unnamed = "the bundled demo's conversations" if "data" in options else "not recorded"
    data = ", ".join(f"`{name}`" for name in options.get("data") or ())
    data = data or ("random tokens" if record.is_mock else unnamed)
    lines = [f"Data: {data}"]
    if start:
        lines[0] += f" ({start['train_samples']:,} samples, {start['train_tokens']:,} tokens)"
        if (share := start.get("target_own_token_share")) is not None:
            lines[0] += f"; {share:.1%} of the first answers' tokens are the target's own arg-max"
    if options.get("eval_data"):
        lines.append(f"Held out: {', '.join(f'`{name}`' for name in options['eval_data'])}")
    digest = f" (sha256 of its weights: {record.start_digest}...)" if record.start_digest else ""
    shown = [
        f"`--{name} {options[name]}`{digest if name == 'init_from' else ''}"
        for name in SHOWN_OPTIONS
        if options.get(name) is not None
    ]
    paragraphs = [".\n\n".join(lines) + ".", "Options: " + ", ".join(shown) + "."]
    if options.get("init_from") and record.last("end").get("best_step") == 0:
        paragraphs.insert(0, "No step improved on the head that training started from; this is that head.")
    return ["## Training", *paragraphs]


def _acceptance(record: RunRecord) -> list[str]:
    """The table of the kept head's validation; nothing where nothing was validated."""
    kept = record.kept_validation()
    lengths = kept.get("eval_acceptance_length")
    if not lengths:
        return []
    rows = [["expected", *map(_figure, lengths.values())], *_measured(record, kept["step"], list(lengths))]
    rates, hits = kept["eval_acceptance_rate"], kept["eval_top1_agreement"]
    return [
        "## Acceptance",
        f"On held-out answers, at step {kept['step']:,}. Acceptance length: tokens emitted per verify step, "
        "the bonus token included, when n tokens are drafted in a chain; expected: walked over the answers "
        "as a greedy decoder would.",
        _table(["acceptance length, n =", *lengths], rows),
        _table(
            ["depth", *map(str, range(len(rates)))],
            [["acceptance_rate", *map(_figure, rates)], ["top1_agreement", *map(_figure, hits)]],
        ),
    ]


def _measured(record: RunRecord, step: int, lengths: Sequence[str]) -> list[list[str]]:
    """A row of the table where the kept head has decoded prompts, with the 95 % interval."""
    events = [e for e in record.events if e.get("event") == "measured" and e.get("step") == step]
    cells = {}
    for event in events:
        if figure := event.get("acceptance_length"):
            interval = "" if figure.get("low") is None else f" ({figure['low']:.3f} to {figure['high']:.3f})"
            cells[str(event["num_speculative_tokens"])] = f"{figure['value']:.3f}{interval}"
    row = ["measured by decoding", *(cells.get(n, "-") for n in lengths)]
    return [row] if any(n in cells for n in lengths) else []


def serving(head: Served, engine: str | None) -> list[str]:
    """Paragraphs on how to serve: for the engine of an export, or for all."""
    if engine is not None:
        engines = (VLLM, LLAMACPP) if engine == SPECULATORS_FORMAT else (engine,)
        return [_engine_section(name, head) for name in engines]
    export = (
        f"python -m eagle_train export --draft {shlex.quote(head.draft)} --target {shlex.quote(head.target)}"
    )
    sections = [_engine_section(VLLM, head)]
    if head.is_default:
        sections.append(_engine_section(SGLANG, head))
    else:
        sections.append(
            _code(
                "SGLang reads its aux layers from another key; export first",
                f"{export} --to sglang --out OUT",
            )
        )
    sections.append(_engine_section(TENSORRT, head))
    sections += [
        _code(f"{ENGINES[name]}, after the steps that this writes", f"{export} --to {name} --out OUT")
        for name in (OPENVINO, LLAMACPP)
    ]
    return sections


def _engine_section(engine: str, head: Served) -> str:
    lines = [*steps(engine, head), serve_command(engine, head) or ""]
    where = ", run inside this directory" if len(lines) > 1 else ""
    python = (", the last line in Python" if where else ", in Python") if engine in IN_PYTHON else ""
    read_only = f" ({BY_SOURCE})" if engine in NEVER_RUN else ""
    return _code(f"{ENGINES[engine]}{read_only}{where}{python}", "\n".join(lines))


def _code(title: str, text: str) -> str:
    return f"{title}:\n\n```\n{text}\n```"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
