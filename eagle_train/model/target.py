"""The frozen target: features, labels' logits and embeddings of any Hugging Face causal LM.

Shapes: T rows, R chosen rows, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.errors import InputError
from eagle_train.model.attention import DocumentLayout
from eagle_train.model.target_attention import PADDED_REMEDY, document_layout, register_target_attention
from eagle_train.model.target_attention import check_target as check_family
from eagle_train.model.target_config import not_loadable, resolve_aux_layer_ids


class Target(Protocol):
    """What training and the objective ask of a target: a `FrozenTarget`, or a `MockTarget` in its place."""

    @property
    def model(self) -> Any: ...
    @property
    def config(self) -> Any: ...
    @property
    def lm_head(self) -> Any: ...
    @property
    def aux_layer_ids(self) -> tuple[int, int, int]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def vocab_size(self) -> int: ...
    def embed(self, token_ids_T: Tensor) -> Tensor: ...
    def features(self, batch: PackedBatch) -> TargetFeatures: ...
    def logits(self, final_hidden_RH: Tensor) -> Tensor: ...
    def final_norm_weight(self) -> Tensor: ...


class FrozenTarget:
    """A causal LM without gradients whose inner states can be read.

    model: on its device, in eval mode; aux_layer_ids: the 0-based layers whose *entering* states are read.
    Raises InputError where the decoder layers, the embedding or the head cannot be found.
    """

    def __init__(self, model: Any, aux_layer_ids: tuple[int, int, int] | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.decoder: Any = model.get_decoder()
        self.layers = _decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.aux_layer_ids = resolve_aux_layer_ids(self.config.num_hidden_layers, aux_layer_ids)
        self.embedding_VH: Tensor = model.get_input_embeddings().weight
        if model.get_output_embeddings() is None:
            raise InputError(
                f"{type(model).__name__} has no output head; name a causal language model as --target"
            )
        self.lm_head: Any = model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.embedding_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VH.dtype

    @property
    def isolates_documents(self) -> bool:
        """Whether the documents of a packed row cannot read each other."""
        return self.model.config._attn_implementation == register_target_attention()

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, V."""
        return self.lm_head.weight.shape[0]

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """The target's raw token embeddings `[T, H]`, as every engine shares them with a draft head."""
        return F.embedding(token_ids_T, self.embedding_VH)

    @contextmanager
    def capture_states(self, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Within the block, every forward puts the state `[B, T, H]` that enters each layer into the dict."""
        captured: dict[int, Tensor] = {}
        hooks = [
            self.layers[layer_id].register_forward_pre_hook(
                _capture_into(captured, layer_id), with_kwargs=True
            )
            for layer_id in layer_ids
        ]
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def features(self, batch: PackedBatch) -> TargetFeatures:
        """Run the decoder once over the batch, documents kept apart, and read the aux and final states."""
        layout = DocumentLayout(batch.cu_seqlens, batch.offsets, batch.max_seqlen)
        if not self.isolates_documents and len(batch.sources) > batch.num_rows:
            raise InputError(
                f"{type(self.model).__name__} was loaded with an attention that reads across documents on "
                "one row; give it padded rows of one document (padding_free=False), or load it with our own"
            )
        # Padded rows are plain causal rows: their padding lies behind the real tokens, which never see it.
        layouts = document_layout(layout) if batch.num_rows == 1 else nullcontext()
        with self.capture_states(self.aux_layer_ids) as captured, layouts:
            output = self.decoder(
                input_ids=batch.input_ids.view(batch.num_rows, -1),
                position_ids=batch.position_ids.view(batch.num_rows, -1),
                use_cache=False,
            )
        aux = torch.cat([captured[layer_id] for layer_id in self.aux_layer_ids], dim=-1)
        return TargetFeatures(aux.flatten(0, 1), output.last_hidden_state.flatten(0, 1))

    @torch.no_grad()
    def logits(self, final_hidden_RH: Tensor) -> Tensor:
        """`[R, V]` next-token logits of chosen rows, with the family's own scaling and soft cap.

        Only these three adjustments are known; `probe_target` compares the result with the model's own
        forward, so a family with another one is refused rather than mistrained.
        """
        logits = self.lm_head(final_hidden_RH)
        if (logit_scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * logit_scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma 2, 3
            logits = torch.tanh(logits / cap) * cap
        return logits

    def final_norm_weight(self) -> Tensor:
        """The scale `[H]` that the target's final norm applies, or ones where it is not an RMS norm.

        Read by norming a vector of ones, because families store it differently (Gemma keeps weight - 1).
        """
        norm = getattr(self.decoder, "norm", None)
        ones = torch.ones(self.config.hidden_size, device=self.device, dtype=self.dtype)
        if norm is None or "RMS" not in type(norm).__name__:
            return ones
        with torch.no_grad():
            return norm(ones)


def load_target(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    aux_layer_ids: tuple[int, int, int] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> FrozenTarget:
    """Load a Hugging Face id or directory; safetensors only.

    attn_implementation: one of transformers' own, which reads padded rows only; None: ours, which keeps the
    documents of a row apart. Raises InputError when it cannot be loaded, with the library's own words.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=dtype,
            attn_implementation=attn_implementation or register_target_attention(),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if attn_implementation and (isinstance(error, ImportError) or attn_implementation in str(error)):
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"--attn_implementation {attn_implementation} cannot be used with {name_or_path} ({reason}); "
                "use eager, or sdpa"
            ) from error
        raise not_loadable(name_or_path, error) from error
    if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(f"--target {name_or_path} lacks {shown}; its files must hold the whole model")
    if attn_implementation is None:
        check_family(model)
    return FrozenTarget(model.to(device), aux_layer_ids)


@torch.no_grad()
def probe_target(target: FrozenTarget) -> None:
    """Two short documents in one batch must give the very logits that the model gives for each alone, and the
    second's states must not change with the first's tokens: on one row, or on a padded row each where the
    target's attention reads across documents.

    Raises InputError naming the class when documents read each other, or when the family scales its logits
    in a way that `FrozenTarget.logits` does not know.
    """
    # Against separate runs float32 differs by summation order only; bf16 rounds each of dozens of layers,
    # which could hide a leak. Two runs of one shape do not differ, or by rounding where experts are batched.
    tolerance, leak_limit = (1e-3, 1e-4) if target.dtype == torch.float32 else (0.06, 5e-3)
    batch, documents = _probe_batch(target)
    first, second = documents
    states = target.features(batch)
    ours = target.logits(torch.cat([states.final_hidden[rows] for rows in documents])).float()
    own = torch.cat(
        [
            target.model(input_ids=batch.input_ids[None, rows], use_cache=False).logits[0].float()
            for rows in documents
        ]
    )
    difference = _relative_difference(ours, own)
    changed_ids = batch.input_ids.clone()
    changed_ids[first] = changed_ids[first].flip(0)
    changed = target.features(replace(batch, input_ids=changed_ids))
    leak = max(
        _relative_difference(changed.aux_hidden_states[second], states.aux_hidden_states[second]),
        _relative_difference(changed.final_hidden[second], states.final_hidden[second]),
    )
    remedy = "use another --target" + (f", or {PADDED_REMEDY}" if target.isolates_documents else "")
    if not leak <= leak_limit:
        raise InputError(
            f"{type(target.model).__name__} reads across the documents of a row: changing one changes the "
            f"states of the next (relative difference {leak:.2g}, limit {leak_limit:.2g}); {remedy}"
        )
    if not difference <= tolerance:
        raise InputError(
            f"{type(target.model).__name__} gives other logits for packed documents than for each alone "
            f"(relative difference {difference:.2g}, limit {tolerance:.2g}): its attention reads across "
            f"documents or its head scales logits in an unknown way; {remedy}"
        )


def _probe_batch(target: FrozenTarget) -> tuple[PackedBatch, list[slice]]:
    """A document of 5 tokens and one of 9, and where they lie; padded, the first has 4 slots of padding."""
    offsets: tuple[int, ...] = (0, 5, 14)
    documents = [slice(0, 5), slice(5, 14)]
    if not target.isolates_documents:
        offsets, documents = (0, 5, 9, 18), [slice(0, 5), slice(9, 18)]
    generator = torch.Generator().manual_seed(0)
    num_ids = min(target.vocab_size, len(target.embedding_VH))
    ids = torch.randint(0, num_ids, (offsets[-1],), generator=generator)
    position_ids = torch.zeros_like(ids)
    for rows in documents:
        position_ids[rows] = torch.arange(rows.stop - rows.start)
    batch = PackedBatch(
        input_ids=ids,
        position_ids=position_ids,
        answer_remaining=torch.zeros(len(ids), dtype=torch.int32),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        offsets=offsets,
        max_seqlen=9,
        num_tokens=14,
        num_rows=1 if target.isolates_documents else 2,
        sources=("probe", "probe"),
    )
    return batch.to(target.device), documents


def _relative_difference(x: Tensor, y: Tensor) -> float:
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def _decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise InputError(
        f"{type(decoder).__name__} has no list of {num_layers} decoder layers; its states cannot be read"
    )


def _capture_into(captured: dict[int, Tensor], layer_id: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[layer_id] = args[0] if args else kwargs["hidden_states"]

    return hook
