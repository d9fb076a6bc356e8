"""A stand-in for a target: random features and no forward, so that a draft head's own speed can be measured
for any target's sizes without its weights.

Shapes: T rows, R chosen rows, H hidden, V vocabulary.
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.errors import InputError
from eagle_train.model.target_config import resolve_aux_layer_ids

TABLE_ROWS = 4096  # features repeat for token ids this far apart
LOGIT_SCALE = 2.0  # standard deviation of the logits
MAX_POSITIONS = 131_072
MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB = 65_536, 1_000, 2**20


class MockTarget:
    """What training asks of a `FrozenTarget`, from random numbers of a fixed seed.

    A row's features depend on its token id alone and are looked up, so that a step spends no time on random
    numbers. Embedding and output head are one tensor. Numbers differ between devices and dtypes.

    Raises InputError where three aux layers cannot be had of `num_layers`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_layers: int,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        aux_layer_ids: tuple[int, int, int] | None = None,
    ) -> None:
        self.aux_layer_ids = resolve_aux_layer_ids(num_layers, aux_layer_ids)
        self.config: Any = mock_config(hidden_size, num_layers, vocab_size)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype, device="meta")
        weight_VH = normal(vocab_size, hidden_size).mul_(LOGIT_SCALE * hidden_size**-0.5)
        self.lm_head.weight = nn.Parameter(weight_VH, requires_grad=False)
        self.embedding_VH: Tensor = self.lm_head.weight
        self.aux_table: Tensor = normal(TABLE_ROWS, 3 * hidden_size)
        self.final_table: Tensor = normal(TABLE_ROWS, hidden_size)

    @property
    def model(self) -> "MockTarget":
        return self

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VH.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, V."""
        return self.lm_head.weight.shape[0]

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Token embeddings `[T, H]`."""
        return F.embedding(token_ids_T, self.embedding_VH)

    @torch.no_grad()
    def features(self, batch: PackedBatch) -> TargetFeatures:
        """The table row of each token."""
        rows_T = batch.input_ids % TABLE_ROWS
        return TargetFeatures(self.aux_table[rows_T], self.final_table[rows_T])

    @torch.no_grad()
    def logits(self, final_hidden_RH: Tensor) -> Tensor:
        """`[R, V]` next-token logits of chosen rows."""
        return self.lm_head(final_hidden_RH)

    def final_norm_weight(self) -> Tensor:
        """Ones `[H]`."""
        return torch.ones(self.config.hidden_size, device=self.device, dtype=self.dtype)


def mock_config(hidden_size: int, num_layers: int, vocab_size: int) -> Any:
    """A Llama config of the usual proportions.

    Heads of 128 from a hidden size of 2048 on, else 64, else the largest power of two up to 32 that divides
    it; four query heads a key head where they divide so, else one; an MLP of 4H.
    """
    head_dim = _head_dim(hidden_size)
    num_heads = hidden_size // head_dim
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 4 if num_heads % 4 == 0 else num_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=MAX_POSITIONS,
    )


def parse_mock_target(text: str) -> tuple[int, int, int]:
    """(hidden size, layers, vocabulary) of "hidden,layers,vocab", for example "4096,36,151936".

    Raises InputError naming the part that is no whole number or too small or too large.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise InputError(
            f"--mock_target is {text!r}; give three whole numbers hidden,layers,vocab, for example "
            "4096,36,151936"
        )
    hidden_size, num_layers, vocab_size = (int(part) for part in parts)
    limits = (
        ("hidden size", hidden_size, MAX_HIDDEN),
        ("number of layers", num_layers, MAX_LAYERS),
        ("vocabulary", vocab_size, MAX_VOCAB),
    )
    for name, value, most in limits:
        if not 1 <= value <= most:
            raise InputError(f"--mock_target is {text!r}: its {name} must lie between 1 and {most}")
    if hidden_size % 16:
        raise InputError(
            f"--mock_target is {text!r}: its hidden size must be a multiple of 16, for example "
            f"{-(-hidden_size // 16) * 16}"
        )
    return hidden_size, num_layers, vocab_size


def _head_dim(hidden_size: int) -> int:
    if hidden_size >= 2048 and hidden_size % 128 == 0:
        return 128
    return 64 if hidden_size % 64 == 0 else math.gcd(hidden_size, 32)
