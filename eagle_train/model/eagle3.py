"""The EAGLE-3 draft head: one Llama layer that reads the next token's embedding beside fused target states.

DESIGN of the layer (Li et al. 2025, EAGLE-3, section 3.1; official `traineagle3/cnets.py`):

    hidden  = fc(aux_hidden_states)                                   step 0; later: the layer's own output
    x       = concat[input_layernorm(embed(token)), hidden_norm(hidden)]
    hidden  = hidden + o_proj(attention(q(x), k(x), v(x)))
    out     = hidden + mlp(post_attention_layernorm(hidden))          goes into the next step, un-normed
    logits  = lm_head(norm(out))                                      over the draft vocabulary

Attribute names are the official checkpoint's, so a state dict is a checkpoint. Shapes: T rows, H hidden, N
heads, d head size, V vocabulary, V_d draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle_train.model.layers import Linear, RMSNorm, SwiGLU, apply_rope, rope_tables

# (query [T, N, d], key [T, N_kv, d], value [T, N_kv, d]) -> [T, N, d]; the caller keeps earlier keys and
# values.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of a draft head; everything but the draft vocabulary comes from the target."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    aux_layer_ids: tuple[int, int, int] | None  # None: the default (2, L//2, L-3) of the target


class SelfAttention(nn.Module):
    """Projections of the draft layer's attention; q, k and v read 2H."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(2 * config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = Linear(2 * config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = Linear(2 * config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        # The token read at a row enters only through that row's attention to itself. With queries that start
        # as their group's keys a row first looks at itself; with independent ones it averages over the
        # document.
        group = config.num_attention_heads // config.num_key_value_heads
        keys_H_d_2H = self.k_proj.weight.detach().unflatten(0, (config.num_key_value_heads, config.head_dim))
        self.q_proj.weight.data.copy_(keys_H_d_2H.repeat_interleave(group, dim=0).flatten(0, 1))

    def project(self, x_T2H: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query `[T, N, d]`, rotated key and value `[T, N_kv, d]`."""
        query, key, value = (
            projection(x_T2H).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value


class DraftLayer(nn.Module):
    """The decoder layer of the module's docstring, in two halves: attention stands between them."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def before_attention(
        self, embeds_TH: Tensor, hidden_TH: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_T2H = torch.cat([self.input_layernorm(embeds_TH), self.hidden_norm(hidden_TH)], dim=-1)
        return self.self_attn.project(x_T2H, cos, sin)

    def after_attention(self, hidden_TH: Tensor, attended_TNd: Tensor) -> Tensor:
        hidden_TH = hidden_TH + self.self_attn.o_proj(attended_TNd.flatten(-2))
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))


class Eagle3DraftHead(nn.Module):
    """All trained tensors of an EAGLE-3 head and the draft vocabulary's maps.

    d2t int64 `[V_d]`: offsets, target id = i + d2t[i]; t2d bool `[V]`: in the draft vocabulary. The token
    embedding is the target's, frozen, and is passed to `step` already looked up. gradient_checkpointing:
    whether the unroll computes a step's activations again in the backward instead of keeping them.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.fc = Linear(3 * config.hidden_size, config.hidden_size)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(config.draft_vocab_size))

    @torch.no_grad()
    def set_vocabulary(self, draft_token_ids: Tensor) -> None:
        """Use the sorted target ids `[V_d]` as the draft vocabulary."""
        self.d2t.copy_(
            draft_token_ids.to(self.d2t.device) - torch.arange(len(self.d2t), device=self.d2t.device)
        )
        self.t2d.zero_()
        self.t2d[draft_token_ids.to(self.t2d.device)] = True

    @torch.no_grad()
    def start_from_target(
        self, lm_head_VH: Tensor, norm_weight_H: Tensor, aux_hidden_states_T3H: Tensor
    ) -> None:
        """Head rows and final norm of the target; `fc` as the highest aux state at unit scale, with a little
        noise.

        aux_hidden_states_T3H: an example that tells their scale. States of some targets are ten or a hundred
        times larger than what a fresh layer adds to them, which would silence the layer; a row's median is
        taken because the first token of a document can be larger still (Sun et al. 2024, massive
        activations).
        """
        hidden_size = self.config.hidden_size
        scale = aux_hidden_states_T3H.float().square().mean(-1).sqrt().median()
        self.fc.weight.normal_(std=0.2 * (3 * hidden_size) ** -0.5)
        self.fc.weight[:, 2 * hidden_size :] += torch.eye(hidden_size, device=self.fc.weight.device)
        self.fc.weight.div_(scale)
        self.lm_head.weight.copy_(lm_head_VH[self.draft_token_ids.to(lm_head_VH.device)])
        self.norm.weight.copy_(norm_weight_H)

    @property
    def draft_token_ids(self) -> Tensor:
        """Target id of each draft-vocabulary entry, int64 `[V_d]`."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, aux_hidden_states_T3H: Tensor) -> Tensor:
        """The hidden state that enters step 0, `[T, H]`."""
        return self.fc(aux_hidden_states_T3H)

    def project(
        self, embeds_TH: Tensor, hidden_TH: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a step's attention reads: query `[T, N, d]`, key and value `[T, N_kv, d]`, rotated."""
        cos, sin = rope_tables(positions_T, self.config.head_dim, self.config.rope_theta, hidden_TH.dtype)
        return self.midlayer.before_attention(embeds_TH, hidden_TH, cos, sin)

    def finish(self, hidden_TH: Tensor, attended_TNd: Tensor) -> Tensor:
        """A step's output `[T, H]`, un-normed, from what entered it and what its attention gave."""
        return self.midlayer.after_attention(hidden_TH, attended_TNd)

    def step(self, embeds_TH: Tensor, hidden_TH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """One pass of the draft layer: `[T, H]`, un-normed."""
        attended_TNd = attend(*self.project(embeds_TH, hidden_TH, positions_T))
        return self.finish(hidden_TH, attended_TNd)

    def logits(self, out_RH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, `[R, V_d]`, in the input's dtype."""
        return self.lm_head(self.norm(out_RH))
