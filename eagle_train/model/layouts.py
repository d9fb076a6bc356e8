"""Draft heads as others publish them, read into one form: a flat config and the official tensor names.

official      `config.json` is flat, the layer is `midlayer.*` (SpecForge's own files: `layers.0.*`)
speculators   `transformer_layer_config` holds the layer's sizes, the layer is `layers.0.*`
EAGLE-1       flat config, `fc` reads 2H, the layer is `layers.0.*` without an input norm

Weights lie in one `model.safetensors`, or in shards that `model.safetensors.index.json` lists. Nothing is
unpickled.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from eagle_train.errors import InputError

OFFICIAL, SPECULATORS = "official", "speculators"
EAGLE1, EAGLE3 = "EAGLE-1", "EAGLE-3"
AUX_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
INDEX = "model.safetensors.index.json"
DEFAULT_RMS_NORM_EPS = 1e-6  # of transformers' LlamaConfig, which engines read a config without the key with
# A table of rotary frequencies that older transformers stored with the weights, and everybody computes.
BUFFER = ".rotary_emb.inv_freq"
# What torch.compile, DDP and a surrounding model put before a name.
PREFIXES = ("_orig_mod.", "module.", "model.")
# The largest value of each size: far above any real head's, and a loop or a shape of it still ends.
MOST, MOST_LAYERS, MOST_POSITIONS, MOST_NUMBER = 2**24, 1000, 2**31, 1e30
SIZES = {
    "hidden_size": MOST, "intermediate_size": MOST, "num_attention_heads": MOST, "num_key_value_heads": MOST,
    "head_dim": MOST, "num_hidden_layers": MOST_LAYERS, "vocab_size": MOST, "draft_vocab_size": MOST,
    "target_hidden_size": MOST, "num_aux_hidden_states": MOST_LAYERS,
    "max_position_embeddings": MOST_POSITIONS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A draft head's directory as it was read, before anything about it is believed.

    config: `config.json` as it is; flat: the same as one flat dict, where speculators nests; tensors: under
    official names (EAGLE-1: its own); prefixed: the file's own name of each tensor whose prefix was taken
    off here; buffers: names in the file that are no weights (`BUFFER`) and were left out; beside: weight
    files that some loaders read and that were not read here.
    """

    directory: Path
    layout: str
    algorithm: str
    config: dict[str, Any]
    flat: dict[str, Any]
    tensors: dict[str, Tensor]
    prefixed: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def option(self, name: str) -> Any:
        """An option from the flat config or its `eagle_config`, where engines look for it in one or the
        other: what is set in either; None where both are silent.
        """
        values = (self.flat.get(name), eagle_config(self.flat).get(name))
        told = [value for value in values if value is not None]
        return next((value for value in told if value), told[0] if told else None)


def read_stored_head(directory: str | Path) -> StoredHead:
    """Config and tensors of a draft head in any published layout.

    Raises InputError where a file is missing or broken, weights are pickled only, or it is no draft head.
    """
    directory = Path(directory)
    config = read_config_json(directory)
    stored = read_tensors(directory)
    buffers = tuple(sorted(name for name in stored if name.endswith(BUFFER)))
    named = {name: tensor for name, tensor in stored.items() if name not in buffers}
    names = {without_prefix(name, named): name for name in named}
    tensors = {name: named[own] for name, own in names.items()}
    layout = SPECULATORS if "transformer_layer_config" in config else OFFICIAL
    flat = flat_config(config)
    if wrong := _ill_typed(flat):
        raise InputError(f"{directory / 'config.json'} cannot be read: {'; '.join(wrong)}")
    if other := _other_algorithm(flat):
        raise InputError(f"{directory}: its config names a {other} head; EAGLE-1 and EAGLE-3 are known here")
    algorithm = _algorithm(flat, tensors)
    if algorithm is None:
        raise InputError(
            f"{directory} holds no draft head: neither its tensors ({', '.join(sorted(named)[:2])}, ...) nor "
            "its config are those of EAGLE-1 or EAGLE-3; name the draft head's own directory"
        )
    if algorithm == EAGLE3:
        names = official_names(names, directory)
    return StoredHead(
        directory,
        layout,
        algorithm,
        config,
        flat,
        {name: named[own] for name, own in names.items()},
        {name: own for name, own in names.items() if own.startswith(PREFIXES)},
        buffers,
        files_beside(directory),
    )


def read_config_json(directory: Path) -> dict[str, Any]:
    """`config.json` as a dict. Raises InputError where it is absent or no JSON object."""
    path = directory / "config.json"
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        raise InputError(f"{path} does not exist; name a directory that holds a trained draft head")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object; it is not an EAGLE-3 head's config")
    return values


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one file or from shards, as they are named there.

    Raises InputError where there is none in safetensors, or a shard is absent or broken.
    """
    tensors: dict[str, Tensor] = {}
    for path in tqdm(weight_files(directory), desc="reading", unit="file", leave=False, delay=3):
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is not a sound safetensors file: {error}") from error
    index = directory / INDEX
    if index.is_file() and not (directory / "model.safetensors").is_file():
        lost = sorted(set(read_weight_map(index)) - set(tensors))
        if lost:
            raise InputError(f"{index} lists {', '.join(lost[:3])}, which no shard holds; fetch it again")
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, or the shards of the index, or else every .safetensors file."""
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        files = [directory / name for name in sorted(set(read_weight_map(index).values()))]
        if lost := [path.name for path in files if not os.path.isfile(path)]:
            raise InputError(f"{index} lists {', '.join(lost[:3])}, which is absent; fetch the missing shard")
        return files
    if files := sorted(directory.glob("*.safetensors")):
        return files
    pickled = ", ".join(path.name for path in sorted(directory.glob("*.bin")))
    raise InputError(
        f"{directory} holds no .safetensors file{f' but {pickled}' * bool(pickled)}; other weight formats "
        "are not unpickled. Convert it with safetensors where you trust its origin"
    )


def files_beside(directory: Path) -> tuple[str, ...]:
    """Weight files that engines read beside those of `weight_files`, or instead of them: without an index
    every .safetensors file, with one those that it lists.
    """
    read = {path.name for path in weight_files(directory)}
    index = directory / INDEX
    if index.is_file():
        return tuple(sorted(set(read_weight_map(index).values()) - read))
    return tuple(sorted({path.name for path in directory.glob("*.safetensors")} - read))


def read_weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, from `model.safetensors.index.json`. Raises InputError where it is none, or names
    a file outside its directory.
    """
    try:
        values = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"{index} is not an index of shards: {shown(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values.values()):
        raise InputError(f"{index} is not an index of shards: weight_map must map tensors to file names")
    for name in values.values():
        if (path := PurePath(name)).is_absolute() or ".." in path.parts:
            raise InputError(
                f"{index} names {name}, which lies outside its directory; keep the shards beside it"
            )
    return values


def without_prefix(name: str, taken: Iterable[str]) -> str:
    """A name without `PREFIXES`, however often they stand there; as it is where that name is taken."""
    bare = name
    while found := [prefix for prefix in PREFIXES if bare.startswith(prefix)]:
        bare = bare.removeprefix(found[0])
    return name if bare in taken else bare


def official_names(names: dict[str, str], directory: Path) -> dict[str, str]:
    """The keys with `layers.0.` renamed to `midlayer.`. Raises InputError where a file has both."""
    renamed = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: own
        for name, own in names.items()
    }
    if len(renamed) < len(names):
        both = next(name for name in names if f"layers.0.{name.removeprefix('midlayer.')}" in names)
        raise InputError(f"{directory}: {both} is there under layers.0. too; keep one of the two")
    return renamed


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config as engines read it: speculators' nested layer config with the outer keys over it."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        # A null means that the key is absent, but for one that some engines stumble over.
        return {k: v for k, v in config.items() if v is not None or k == "target_hidden_size"}
    # The outer class and type are the speculator's; the layer has its own.
    own = ("transformer_layer_config", "architectures", "model_type")
    outer = {k: v for k, v in config.items() if k not in own}
    # The outer null of target_hidden_size means "as the draft's"; engines leave it out.
    if outer.get("target_hidden_size") is None:
        outer.pop("target_hidden_size", None)
    return {key: value for key, value in (layer | outer).items() if value is not None}


def _ill_typed(flat: dict[str, Any]) -> list[str]:
    """Values that the rest of this package would stumble over, each with what it must be."""
    numbers = {"rms_norm_eps": flat.get("rms_norm_eps"), "rope_theta": flat.get("rope_theta")}
    numbers["rope_parameters"] = rope_parameters(flat).get("rope_theta")
    lists = {AUX_IDS_KEY: flat.get(AUX_IDS_KEY), "eagle_config": eagle_config(flat).get(AUX_IDS_KEY)}
    words = {key: flat.get(key) for key in ("architectures", "layer_types")}
    wrong = [
        f"{key} is {shown(flat[key])}, not a whole number from 1 to {most:,}"
        for key, most in SIZES.items()
        if flat.get(key) is not None and (type(flat[key]) is not int or not 1 <= flat[key] <= most)
    ]
    wrong += [
        f"{key} is {shown(value)}, not a number above 0"
        for key, value in numbers.items()
        if value is not None and (type(value) not in (int, float) or not 0 < value <= MOST_NUMBER)
    ]
    for named, kind, what in ((lists, int, "layers"), (words, str, "words")):
        for key, value in named.items():
            if value is not None and not (isinstance(value, list) and all(type(v) is kind for v in value)):
                wrong.append(f"{key} is {shown(value)}, not a list of {what}")
    return wrong


def shown(value: object) -> str:
    """A value as a message shows it: in one line of bounded length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]}..."


def aux_layer_ids(flat: dict[str, Any]) -> list[int] | None:
    """Layers whose entering states the head reads (hs[x]), as far as the config says; None: the default.

    A top-level list counts so (vLLM, llama.cpp, speculators). One inside `eagle_config` counts layer outputs
    (SGLang, SpecForge, TensorRT-LLM), one less; where both stand, the top-level one is read.
    """
    if top := flat.get(AUX_IDS_KEY):
        return list(top)
    inner = eagle_config(flat).get(AUX_IDS_KEY)
    return [x + 1 for x in inner] if inner else None


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """What engines read where the config is silent (OpenVINO: one block later)."""
    return (2, num_layers // 2, num_layers - 3)


def rope_of(flat: dict[str, Any]) -> tuple[float, str]:
    """Rotary base and kind of scaling ("default" for none), from either config schema."""
    parameters = rope_parameters(flat)
    return float(parameters.get("rope_theta") or flat.get("rope_theta") or 10_000.0), scaling_kind(parameters)


def scaling_kind(rope_parameters: Mapping[str, Any]) -> str:
    """The kind of rotary scaling under its present name or its old one; "default" for none."""
    return rope_parameters.get("rope_type") or rope_parameters.get("type") or "default"


def rope_parameters(flat: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of full attention, from either config schema; empty where there are none."""
    parameters = flat.get("rope_parameters") or flat.get("rope_scaling")
    parameters = parameters if isinstance(parameters, dict) else {}
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def eagle_config(flat: dict[str, Any]) -> dict[str, Any]:
    """The options that some publishers nest; empty where there are none."""
    values = flat.get("eagle_config")
    return values if isinstance(values, dict) else {}


def _other_algorithm(flat: dict[str, Any]) -> str | None:
    """A drafter of another kind by the name in its config, as its tensors can look like EAGLE-3's."""
    named = flat.get("speculators_model_type")
    if named is not None and named not in ("eagle", "eagle3"):
        return str(named)
    others = ("dflash", "medusa", "peagle", "mtp", "hydra")
    classes = " ".join(flat.get("architectures") or ()).lower()
    return next((word for word in others if word in classes), None)


def _algorithm(flat: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
    fc = tensors.get("fc.weight")
    has_layer = any("hidden_norm." in name or name.startswith("midlayer.") for name in tensors)
    if fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0] and not has_layer:
        return EAGLE1
    named = "eagle3" in f"{flat.get('architectures')} {flat.get('speculators_model_type')}".lower()
    return EAGLE3 if has_layer or named or "draft_vocab_size" in flat or fc is not None else None
