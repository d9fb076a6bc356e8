"""Small targets with draft heads that hit and miss, and prompts of ragged lengths."""

import numpy as np
import torch

from eagle_train.data.collator import BucketingCollator
from eagle_train.decode.chain import decode_plain
from eagle_train.decode.results import Prompt, answer_samples
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.train.evaluate import micro_batch_sums, step_weights
from tests.documents import random_head

LENGTHS = (9, 1, 23, 4, 14, 2)
TTT_STEPS = 3


def random_prompts(lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 96) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(tuple(generator.integers(3, vocab_size, length).tolist()), f"prompts:{index}")
        for index, length in enumerate(lengths)
    ]


def own_head(
    target: FrozenTarget, prompts: list[Prompt], draft_vocab_size: int = 80, temperature: float = 0.0
) -> Eagle3DraftHead:
    """A head fitted to the target's own answers to the very prompts, but for tokens that it cannot draft."""
    results = decode_plain(
        target, prompts, max_new_tokens=24, temperature=temperature, ignore_eos=True, progress=False
    )
    batch = BucketingCollator(1)(answer_samples(prompts, results))
    weights = step_weights(batch.supervised_counts(TTT_STEPS), 0.8)
    head = random_head(target, draft_vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    for _ in range(40):
        micro_batch_sums(head, target, batch, weights).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
