"""What `compare_engines.py` compares: heads with their prompts, the counts that teacher forcing expects, and
those of our decoder.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_train import BucketingCollator, InputError, Sample
from eagle_train.data.samples import answer_remaining_from_spans
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.prompts import read_prompts
from eagle_train.decode.results import Prompt
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.objective.acceptance import leading_hits
from eagle_train.train.evaluate import micro_batch_sums


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """One prompt decoded: its new tokens, and the counts of its verify steps. None: not told."""

    token_ids: list[int] | None
    verify_steps: int
    drafted: int
    accepted: int
    accepted_per_position: list[int] | None


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts under one decoder. capped: whether the last step drafts no more than can be used."""

    name: str
    capped: bool
    prompts: list[PromptCounts]

    def totals(self) -> PromptCounts:
        by_position = [prompt.accepted_per_position for prompt in self.prompts]
        told = [counts for counts in by_position if counts is not None]
        return PromptCounts(
            token_ids=None,
            verify_steps=sum(prompt.verify_steps for prompt in self.prompts),
            drafted=sum(prompt.drafted for prompt in self.prompts),
            accepted=sum(prompt.accepted for prompt in self.prompts),
            accepted_per_position=np.sum(told, axis=0).tolist() if len(told) == len(by_position) else None,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One head and its prompts. max_new_tokens: of each prompt."""

    target_dir: Path
    draft_dir: Path
    prompts: list[Prompt]
    num_speculative_tokens: int
    max_new_tokens: list[int]


def probe_case(folder: Path) -> Case:
    """A fixture: target/, draft/, and prompts in counts.json."""
    counts = json.loads((folder / "counts.json").read_text())
    prompts = [
        Prompt(tuple(row["prompt_ids"]), f"probe:{index}") for index, row in enumerate(counts["prompts"])
    ]
    return Case(
        folder / "target",
        folder / "draft",
        prompts,
        counts["num_speculative_tokens"],
        [counts["max_new_tokens"]] * len(prompts),
    )


def head_case(
    target_dir: Path,
    draft_dir: Path,
    prompt_file: Path,
    num_prompts: int,
    num_speculative_tokens: int,
    max_new_tokens: int,
) -> Case:
    """A head and num_prompts prompts of a file, evenly spaced."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts, _ = read_prompts([prompt_file], tokenizer, max_prompts=num_prompts)
    return Case(target_dir, draft_dir, prompts, num_speculative_tokens, [max_new_tokens] * len(prompts))


def with_target_greedy(case: Case) -> tuple[Case, list[list[int]]]:
    """The case with each answer cut before its end of text, and what the target alone answers, by Hugging
    Face's own generate in float32: n tokens more than are decoded, so that a last draft can be judged whole.

    Prompts whose answer ends within two tokens are left out: the first token comes from the prefill and is
    nobody's draft. Raises InputError where none is left.
    """
    model = AutoModelForCausalLM.from_pretrained(case.target_dir, dtype=torch.float32)
    named = model.generation_config.eos_token_id  # one, several or none
    stop_ids = [named] if isinstance(named, int) else named or []
    model.generation_config.eos_token_id = None  # what lies behind an end of text is wanted too
    n = case.num_speculative_tokens
    kept: list[tuple[Prompt, int, list[int]]] = []
    for prompt, limit in zip(
        tqdm(case.prompts, desc="target alone", unit="prompt"), case.max_new_tokens, strict=True
    ):
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            ids, max_new_tokens=limit + n, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        tokens = output[0, ids.shape[1] :].tolist()
        length = next((i for i, token in enumerate(tokens[:limit]) if token in stop_ids), limit)
        if length >= 2:
            kept.append((prompt, length, tokens[: length + n]))
    if left_out := len(case.prompts) - len(kept):
        print(f"{left_out} of {len(case.prompts)} prompts left out: answered in one token", file=sys.stderr)
    if not kept:
        raise InputError(f"{case.target_dir} answers each prompt in one token; name other prompts")
    prompts, lengths, greedy = map(list, zip(*kept, strict=True))
    return replace(case, prompts=prompts, max_new_tokens=lengths), greedy


def expected_leading_hits(
    head: Eagle3DraftHead, target: FrozenTarget, prompt: Prompt, answer: list[int], n: int
) -> list[int]:
    """By teacher forcing: how many of n drafted tokens the target accepts after each of the answer's tokens.

    Element i: the answer's first i + 1 tokens are there, and the draft is for those that follow. What lies
    beyond the answer counts as missed.
    """
    start, length = len(prompt.token_ids), len(prompt.token_ids) + len(answer)
    remaining = answer_remaining_from_spans(length, [(start, length)])
    sample = Sample(np.array([*prompt.token_ids, *answer], dtype=np.int32), remaining, prompt.source)
    batch = BucketingCollator(bucket_granularity=1)([sample])
    sums = micro_batch_sums(head, target, batch, torch.zeros(n), differentiable=False)
    return leading_hits(sums.hits_KT.numpy())[start - 1 : length - 1].tolist()


def walk(leading: list[int], n: int, max_new_tokens: int, *, capped: bool) -> PromptCounts:
    """The verify steps of one answer of max_new_tokens tokens, the first of which the prefill gives.

    The chain walk of `objective.acceptance` with an engine's rule for the last step: n drafted tokens always,
    or (capped) no more than the tokens left less one, where a step without drafts is not counted.
    """
    num_tokens, steps, drafted = 1, 0, 0
    accepted = np.zeros(n, dtype=np.int64)
    while num_tokens < max_new_tokens:
        allowed = min(n, max_new_tokens - num_tokens - 1) if capped else n
        hits = min(leading[num_tokens - 1], allowed)
        steps += allowed > 0
        drafted += allowed
        accepted[:hits] += 1
        num_tokens += hits + 1
    return PromptCounts(None, steps, drafted, int(accepted.sum()), accepted.tolist())


def measure(head: Eagle3DraftHead, target: FrozenTarget, case: Case, *, capped: bool) -> Run:
    """Our decoder; prompt by prompt, since each answer has a length of its own."""
    results = [
        measure_acceptance(
            target,
            head,
            [prompt],
            num_speculative_tokens=case.num_speculative_tokens,
            max_new_tokens=num_tokens,
            ignore_eos=True,
            cap_last_step=capped,
            progress=False,
        )[0]
        for prompt, num_tokens in zip(
            tqdm(case.prompts, desc="our decoder", unit="prompt"), case.max_new_tokens, strict=True
        )
    ]
    prompts = [
        PromptCounts(
            list(result.token_ids),
            result.verify_steps,
            result.drafted,
            sum(result.accepted_per_position),
            list(result.accepted_per_position),
        )
        for result in results
    ]
    return Run("measured by us", capped, prompts)


def same_counts(one: PromptCounts, other: PromptCounts) -> bool:
    """Verify steps, drafted and accepted tokens, and acceptance by position where both tell."""
    if (one.verify_steps, one.drafted, one.accepted) != (other.verify_steps, other.drafted, other.accepted):
        return False
    if one.accepted_per_position is None or other.accepted_per_position is None:
        return True
    return one.accepted_per_position == other.accepted_per_position
