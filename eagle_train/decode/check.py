"""What is refused before anything is decoded: pairs that do not belong together, prompts that do not fit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_train.decode.results import Prompt
from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.layouts import default_aux_layer_ids
from eagle_train.model.target import FrozenTarget, Target
from eagle_train.model.target_config import rope_limit

# Between a float32 table and its bf16 copy; a trained table is further away.
EMBEDDING_TOLERANCE = 2**-7
EMBEDDING_ROWS = 4096  # compared at a time, so that a table is never copied whole
LOWEST_TEMPERATURE = 1e-6
PROPOSALS = ("greedy", "sampled")


def draft_aux_layer_ids(target: FrozenTarget, head: Eagle3DraftHead) -> tuple[int, int, int]:
    """The layers of this target whose states the head reads. Raises InputError where it lacks them."""
    num_layers = target.config.num_hidden_layers
    layer_ids = head.config.aux_layer_ids
    if layer_ids is None:
        if num_layers < 7:
            raise InputError(
                "the draft names no aux layers, and the default (2, L//2, L-3) needs at least 7, but the "
                f"target has {num_layers}; use the target that the draft was trained for"
            )
        return default_aux_layer_ids(num_layers)
    if not all(0 <= layer_id < num_layers for layer_id in layer_ids):
        raise InputError(
            f"the draft reads aux layers {' '.join(map(str, layer_ids))}, but the target has layers 0 to "
            f"{num_layers - 1}; use the target that the draft was trained for"
        )
    return layer_ids


def check_pair(target: FrozenTarget, head: Eagle3DraftHead) -> None:
    """Refuse, with InputError, a draft head that was not made for this target or that holds NaNs."""
    remedy = "use the target that the draft was trained for"
    for name, of_draft, of_target in (
        ("hidden size", head.config.hidden_size, target.config.hidden_size),
        ("vocabulary size", head.config.vocab_size, target.vocab_size),
    ):
        if of_draft != of_target:
            raise InputError(f"the draft's {name} is {of_draft}, the target's is {of_target}; {remedy}")
    draft_aux_layer_ids(target, head)
    faulty = [name for name, parameter in head.named_parameters() if not bool(parameter.isfinite().all())]
    if faulty:
        raise InputError(
            f"the draft holds a NaN or an infinity in {', '.join(faulty[:3])}"
            f"{f' and {len(faulty) - 3} more tensors' if len(faulty) > 3 else ''}; use an earlier checkpoint"
        )


def is_embedding_of(target: Target, own_VH: Tensor) -> bool:
    """Whether a table that a head brings is the target's, but for the rounding of either."""
    if len(own_VH) != target.vocab_size:
        return False
    ids_V = torch.arange(target.vocab_size, device=target.device)
    chunks = zip(ids_V.split(EMBEDDING_ROWS), own_VH.split(EMBEDDING_ROWS), strict=True)
    return all(_are_close(own_RH, target.embed(ids_R).cpu()) for ids_R, own_RH in chunks)


def _are_close(own_RH: Tensor, target_RH: Tensor) -> bool:
    return own_RH.shape == target_RH.shape and torch.allclose(
        own_RH.float(), target_RH.float(), rtol=EMBEDDING_TOLERANCE, atol=1e-6
    )


def context_limit(target: FrozenTarget) -> int | None:
    """Tokens of prompt and answer together that the target can position; None: no limit is known."""
    limits = (getattr(target.config, "max_position_embeddings", None), rope_limit(target.config))
    return min((value for value in limits if value is not None), default=None)


def check_prompts(
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    flag: str = "--max_new_tokens",
    remedy: str = "",
) -> None:
    """Refuse, with InputError, an empty list and prompts that the target cannot read or answer in full.

    flag: what sets max_new_tokens; remedy: what else a user can do about a prompt that is too long.
    """
    if not prompts:
        raise InputError("there are no prompts; give at least one")
    limit = context_limit(target)
    for prompt in prompts:
        if not prompt.token_ids:
            raise InputError(f"{prompt.source}: the prompt has no tokens; give it some text")
        if outside := [token for token in prompt.token_ids if not 0 <= token < target.vocab_size]:
            raise InputError(
                f"{prompt.source}: token id {outside[0]} lies outside the target's vocabulary of "
                f"{target.vocab_size}; tokenise the prompt with the target's own tokenizer"
            )
        length = len(prompt.token_ids)
        if limit is not None and length + max_new_tokens > limit:
            lower = f" or lower {flag} to {limit - length}" if length < limit else ""
            raise InputError(
                f"{prompt.source}: the prompt's {length} tokens and {max_new_tokens} new ones exceed the "
                f"target's context of {limit} tokens; shorten the prompt{lower}{remedy}"
            )


def split_long_prompts(
    target: FrozenTarget, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[Prompt], list[Prompt]]:
    """(those that the target can read and answer in full, those that are too long)."""
    longest = context_limit(target)
    fits = [longest is None or len(prompt.token_ids) + max_new_tokens <= longest for prompt in prompts]
    return (
        [prompt for prompt, is_short in zip(prompts, fits, strict=True) if is_short],
        [prompt for prompt, is_short in zip(prompts, fits, strict=True) if not is_short],
    )


def check_options(
    num_speculative_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    proposal: str,
    seed: int,
) -> None:
    """Refuse, with InputError, decoding options out of range."""
    for name, value in (
        ("num_speculative_tokens", num_speculative_tokens),
        ("max_new_tokens", max_new_tokens),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise InputError(f"--{name} is {value}; it must be at least 1")
    # Logits divided by less overflow float32.
    if temperature and not LOWEST_TEMPERATURE <= temperature < math.inf:
        raise InputError(
            f"--temperature is {temperature}; it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    if seed < 0:
        raise InputError(f"--seed is {seed}; it must be at least 0")
    if proposal not in PROPOSALS:
        raise InputError(f"--proposal is {proposal!r}; it must be one of {', '.join(PROPOSALS)}")
