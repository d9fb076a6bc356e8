"""What a target's config tells before any weight is read: sizes, layers, rotary limits."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from eagle_train.errors import InputError
from eagle_train.model.eagle3 import Eagle3Config
from eagle_train.model.layouts import default_aux_layer_ids

if TYPE_CHECKING:
    from eagle_train.model.target import Target


def read_target_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """The target's text config alone, before any weight is read. Raises InputError as `load_target` does."""
    if not name_or_path.strip():
        raise InputError("--target is empty; name a directory or a Hugging Face id")
    # os.path answers where a name is too long for a file; Path raises.
    if not os.path.exists(name_or_path) and (
        name_or_path.startswith(("/", ".")) or name_or_path.count("/") > 1
    ):
        raise InputError(f"--target {name_or_path} does not exist; name a directory or a Hugging Face id")
    if os.path.isdir(name_or_path) and not any(Path(name_or_path).glob("*.safetensors")):
        raise InputError(
            f"--target {name_or_path} holds no .safetensors file; other weight formats are not unpickled. "
            "Convert it with `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` first"
        )
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        text_config = config.get_text_config()
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StrictDataclassError,
    ) as error:  # fmt: skip
        raise not_loadable(name_or_path, error) from error
    if wrong := _wrong_values(text_config):
        raise InputError(f"--target {name_or_path}: its config.json cannot be read ({wrong}); mend it")
    # Only the outer config of a multimodal model names its class.
    text_config.architectures = text_config.architectures or config.architectures
    return text_config


def _wrong_values(text_config: Any) -> str | None:
    """The first value that is not what everything here takes it for; transformers checks some by family."""
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if type(value := getattr(text_config, name, None)) is not int or value < 1:
            return f"{name} is {value!r}, not a whole number above 0"
    theta = _rope_parameters(text_config).get("rope_theta") or getattr(text_config, "rope_theta", None)
    if theta is not None and (type(theta) not in (int, float) or not 0 < theta < float("inf")):
        return f"rope_theta is {theta!r}, not a number above 0"
    return None


def not_loadable(name_or_path: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:300]
    return InputError(
        f"--target {name_or_path} could not be loaded ({reason}); name a Hugging Face id or a directory with "
        "config.json, tokenizer and safetensors"
    )


def resolve_aux_layer_ids(num_layers: int, aux_layer_ids: tuple[int, ...] | None) -> tuple[int, int, int]:
    """Three distinct, rising layer ids in 0..L-1; the default is (2, L//2, L-3).

    An id counts the layer that the state *enters*; L would be the state behind the final norm and is refused.
    """
    if aux_layer_ids is None:
        if num_layers < 7:
            raise InputError(
                f"the target has {num_layers} layers; the default aux layers (2, L//2, L-3) need at least 7. "
                "Name three with --aux_layer_ids, for example --aux_layer_ids 0 1 2"
            )
        return default_aux_layer_ids(num_layers)
    in_range = all(0 <= layer_id < num_layers for layer_id in aux_layer_ids)
    if len(aux_layer_ids) != 3 or not in_range or sorted(set(aux_layer_ids)) != list(aux_layer_ids):
        raise InputError(
            f"--aux_layer_ids is {' '.join(map(str, aux_layer_ids))}; it names {len(aux_layer_ids)} layers "
            f"and must be three rising layer ids between 0 and {num_layers - 1}"
        )
    low, middle, high = aux_layer_ids
    return low, middle, high


def rope_limit(config: Any) -> int | None:
    """Tokens beyond which the rotary embedding changes with the row's length; None: it never does."""
    parameters = _rope_parameters(config)
    if parameters.get("rope_type", "default") not in ("longrope", "dynamic"):
        return None
    return (
        parameters.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )


def check_rope(config: Any, training_seq_len: int) -> None:
    """Refuse rotary embeddings that depend on how long the row is: on a packed row documents would change
    each other.

    Within their original length they are ordinary ones.
    """
    limit = rope_limit(config)
    if limit is not None and training_seq_len > limit:
        raise InputError(
            f"--training_seq_len is {training_seq_len}, but beyond {limit} tokens this target's rotary "
            f"embedding ({_rope_parameters(config)['rope_type']}) changes with the row's length, so "
            f"packed documents would differ from separate ones; use at most {limit}"
        )


def draft_config(
    target: "Target", draft_vocab_size: int, intermediate_size: int | None = None
) -> Eagle3Config:
    """Sizes of the draft layer, read from the target.

    A mixture-of-experts config may name one expert's width, so the draft's MLP is at least as wide as the
    hidden size.
    """
    config = target.config
    num_heads = config.num_attention_heads
    return Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size
        or max(getattr(config, "intermediate_size", None) or 0, config.hidden_size),
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope_theta=_rope_theta(config),
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
        aux_layer_ids=target.aux_layer_ids,
    )


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary parameters; families with several rotary embeddings keep one dict a layer type (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def _rope_theta(config: Any) -> float:
    """The rotary base."""
    parameters = _rope_parameters(config)
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    return float(theta or 10_000.0)
