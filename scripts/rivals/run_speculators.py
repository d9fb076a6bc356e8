"""Training steps of vLLM's speculators' EAGLE-3 draft, for bench_rivals.py, in its own environment.

A step is its `forward` on one packed row padded to row_len, backward, clipping and AdamW. The target's states
are made once, before the clock starts: it has no forward of the target. Its settings are what a CPU allows
(dense attention masks, eager losses) and classic EAGLE-3 (no extra norms, full attention).
"""

from typing import Any

import torch
from protocol import Step, optimizer_step, serve
from speculators.models.eagle3.core import Eagle3DraftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def setup(job: dict[str, Any]) -> Step:
    config = AutoConfig.from_pretrained(job["target"])
    ids = torch.tensor(job["draft_token_ids"])
    in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    in_draft[ids] = True
    rows = packed_rows(job, config.num_hidden_layers)
    config.num_hidden_layers = 1
    config.layer_types = ["full_attention"]
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=in_draft,
        d2t=ids - torch.arange(len(ids)),
        draft_vocab_size=len(ids),
        verifier_name_or_path=job["target"],
        ttt_steps=job["ttt_steps"],
        norm_before_residual=False,
        draft_attn_impl="sdpa",
    ).to(getattr(torch, job["dtype"]))
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=job["ttt_steps"], ttt_step_loss_decay=0.8
    )
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(samples: list[dict[str, Any]]) -> float:
        _, loss, _ = model(**rows[key(samples)], **options)
        return optimizer_step(loss, parameters, optimizer)

    return step


def key(samples: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(token for sample in samples for token in sample["input_ids"])


@torch.no_grad()
def packed_rows(job: dict[str, Any], num_layers: int) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """The tensors of every step. Slot i of a document holds token i + 1 beside the states of token i."""
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"]))
    last: list[Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    made = {}
    for step in job["steps"]:
        samples = [job["samples"][index] for index in step]
        parts: dict[str, list[Tensor]] = {
            name: []
            for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask",
                         "position_ids", "document_ids")
        }  # fmt: skip
        for document, sample in enumerate(samples):
            ids = torch.tensor(sample["input_ids"])
            last.clear()
            states = target(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            aux = [states[layer][0] for layer in (2, num_layers // 2, num_layers - 3)]
            parts["input_ids"].append(ids[1:])
            parts["hidden_states"].append(torch.cat(aux, dim=-1)[:-1])
            parts["verifier_last_hidden_states"].append(last[0][1:])
            parts["loss_mask"].append(torch.tensor(sample["loss_mask"])[1:])
            parts["position_ids"].append(torch.arange(1, len(ids)))
            parts["document_ids"].append(torch.full((len(ids) - 1,), document))
        made[key(samples)] = {
            name: filled_up(torch.cat(tensors), job["row_len"], -1 if name == "document_ids" else 0)[None]
            for name, tensors in parts.items()
        }
    return made


def filled_up(x: Tensor, length: int, value: int) -> Tensor:
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


if __name__ == "__main__":
    serve(setup)
