"""Small targets with draft heads that hit and miss, and prompts of ragged lengths."""

import numpy as np
import torch

from eagle_train.data.collator import BucketingCollator
from eagle_train.decode.chain import decode_plain
from eagle_train.decode.results import Prompt, answer_samples
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from eagle_train.objective.unroll import supervise, unrolled_sums
from eagle_train.train.evaluate import step_weights
from tests.documents import random_head

LENGTHS = (9, 1, 17, 4)
MAX_NEW_TOKENS = 16
TTT_STEPS = 2


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
        target,
        prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=temperature,
        ignore_eos=True,
        progress=False,
    )
    batch = BucketingCollator(1)(answer_samples(prompts, results))
    supervision, features = supervise(batch.answer_remaining, TTT_STEPS), target.features(batch)
    weights = step_weights(batch.supervised_counts(TTT_STEPS), 0.8)
    head = random_head(target, draft_vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    for _ in range(30):
        sums = unrolled_sums(head, target.embed, target.logits, batch, supervision, features, weights)
        sums.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
