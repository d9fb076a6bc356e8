"""Training steps of NVIDIA Model-Optimizer's online EAGLE-3, for bench_rivals.py, in its own environment.

Its `convert` puts the draft module into the target; a step is its `forward` on padded rows of
training_seq_len tokens (its collator pads every row so far), backward, clipping and AdamW.
"""

import copy
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from protocol import Step, optimizer_step, serve
from transformers import AutoModelForCausalLM


def setup(job: dict[str, Any]) -> Step:
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"]))
    sizes = model.config
    config = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"])
    config["eagle_architecture_config"] |= {
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads,
        "draft_vocab_size": len(job["draft_token_ids"]),
    }
    config |= {"eagle_use_torch_compile": False, "eagle_ttt_steps": job["ttt_steps"]}
    config |= {"eagle_loss_decay_factor": 0.8}
    mtsp.convert(model, [("eagle", config)])
    if len(job["draft_token_ids"]) < sizes.vocab_size:
        ids = torch.tensor(job["draft_token_ids"])
        model.eagle_module.d2t.copy_(ids - torch.arange(len(ids)))
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(samples: list[dict[str, Any]]) -> float:
        rows = {
            name: torch.zeros(len(samples), job["row_len"], dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "loss_mask")
        }
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            rows["input_ids"][row, :length] = torch.tensor(sample["input_ids"])
            rows["loss_mask"][row, :length] = torch.tensor(sample["loss_mask"])
            rows["attention_mask"][row, :length] = 1
        return optimizer_step(model(**rows).loss, parameters, optimizer)

    return step


if __name__ == "__main__":
    serve(setup)
