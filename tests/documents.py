"""Documents of random tokens with given answers, and a draft head for a tiny target."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eagle_train.data.collator import BucketingCollator
from eagle_train.data.samples import Sample, answer_remaining_from_spans
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_config import draft_config
from eagle_train.train.evaluate import micro_batch_sums
from eagle_train.train.loop import step_weights

Spans = list[tuple[int, int]]


def document(length: int, spans: Spans, seed: int, vocab_size: int = 96) -> Sample:
    """Random tokens of a fixed seed; spans are half-open token ranges, one an answer."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)
    return Sample(tokens, answer_remaining_from_spans(length, spans), f"document {seed}")


def documents_of(*shapes: tuple[int, Spans]) -> list[Sample]:
    return [document(length, spans, seed) for seed, (length, spans) in enumerate(shapes)]


@torch.no_grad()
def with_own_tokens(target: FrozenTarget, samples: list[Sample]) -> list[Sample]:
    """The samples with every third token of their answers replaced by what the target itself says there."""
    changed = []
    for sample in samples:
        tokens = sample.input_ids.copy()
        for position in range(1, len(tokens), 3):
            if sample.answer_remaining[position - 1] >= 1:
                prefix = torch.from_numpy(tokens[:position]).long()[None]
                tokens[position] = int(target.model(input_ids=prefix).logits[0, -1].argmax())
        changed.append(replace(sample, input_ids=tokens))
    return changed


def random_head(target: FrozenTarget, draft_vocab_size: int, seed: int = 1) -> Eagle3DraftHead:
    """A head with weights large enough that every part of it moves the logits, and a random vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3DraftHead(draft_config(target, draft_vocab_size))
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 0.15 if parameter.ndim == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.ndim == 1))
    head.set_vocabulary(random_vocabulary(target.vocab_size, draft_vocab_size, generator))
    return head


def random_vocabulary(vocab_size: int, draft_vocab_size: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values


def supervised_pairs(length: int, spans: Spans, ttt_steps: int) -> Iterator[tuple[int, int]]:
    """(row, step) by DESIGN's words: x_{t+1} .. x_{t+2+k} all lie in one answer."""
    for step in range(ttt_steps):
        for row in range(length):
            if any(start <= row + 1 and row + 2 + step < stop for start, stop in spans):
                yield row, step


def fitted_head(
    target: FrozenTarget, draft_vocab_size: int, samples: list[Sample], ttt_steps: int
) -> Eagle3DraftHead:
    """A random head trained on the very samples until it hits often, so that hits and misses both occur."""
    head = random_head(target, draft_vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    batch = BucketingCollator(1)(samples)
    weights = step_weights(batch.supervised_counts(ttt_steps), 0.8)
    for _ in range(20):
        micro_batch_sums(head, target, batch, weights).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
