"""A tiny random target with a tokenizer and a chat template, as an object and as a directory on disk."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_train.model.target import FrozenTarget
from eagle_train.model.target_attention import register_target_attention
from tests.data.templates import OWN, make_tokenizer


def tiny_model(model_type: str = "llama", vocab_size: int = 96, **changes: object) -> torch.nn.Module:
    """`M-<type>` of the user cases: hidden 32, 8 layers, 4 heads, 2 KV heads, float32, fixed seed."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_target_attention())
    # Random weights at the usual 0.02 give nearly flat distributions; larger ones let arg-maxes differ.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.float()


def tiny_target(model_type: str = "llama", **changes: object) -> FrozenTarget:
    return FrozenTarget(tiny_model(model_type, **changes))


def write_target(
    directory: Path, model_type: str = "llama", template: str | None = OWN, **changes: object
) -> Path:
    """A complete Hugging Face directory: weights, config, tokenizer, chat template."""
    tokenizer = make_tokenizer(template)
    model = tiny_model(model_type, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def swap_tokens(path: Path) -> None:
    """The same tokens under each other's ids, special ones apart."""
    values = json.loads(path.read_text())
    special = {token["content"] for token in values["added_tokens"]}
    vocabulary = values["model"]["vocab"]
    names = [name for name in vocabulary if name not in special]
    swapped = zip(names, reversed(names), strict=True)
    vocabulary |= {name: vocabulary[other] for name, other in list(swapped)}
    path.write_text(json.dumps(values))
