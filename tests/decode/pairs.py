"""Small targets with draft heads that hit and miss, and prompts of ragged lengths."""

import numpy as np

from eagle_train.decode.chain import decode_plain
from eagle_train.decode.results import Prompt, answer_samples
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from tests.documents import fitted_head

LENGTHS = (9, 1, 23, 4, 14, 2)


def random_prompts(lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 96) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(tuple(generator.integers(3, vocab_size, length).tolist()), f"prompts:{index}")
        for index, length in enumerate(lengths)
    ]


def own_head(target: FrozenTarget, prompts: list[Prompt], draft_vocab_size: int = 48) -> Eagle3DraftHead:
    """A head that has seen the target's own answers to the prompts a few times."""
    results = decode_plain(target, prompts, max_new_tokens=24, ignore_eos=True, progress=False)
    return fitted_head(target, draft_vocab_size, answer_samples(prompts, results), ttt_steps=3)
