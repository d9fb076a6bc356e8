"""`check`, loading and export agree: a sound head loads and is exported, a faulty one neither.

The exceptions are options that the draft layer here does not have: `check` says which engines serve such a
head, loading and export refuse it by the option's name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_train.errors import InputError
from eagle_train.export.check import check_draft_head
from eagle_train.export.write import export_draft_head
from eagle_train.model.checkpoint import load_draft_head
from eagle_train.model.layouts import read_stored_head
from eagle_train.model.options import NEUTRAL, NEUTRAL_EAGLE3, unsupported
from eagle_train.model.target import FrozenTarget, load_target
from tests.export.heads import (
    V_D,
    Tensors,
    change_config,
    change_tensors,
    config_in,
    copy_of,
    drop_config,
    save_head,
)

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SOUND, FAULT = "sound", "a fault"
INV_FREQ = "midlayer.self_attn.rotary_emb.inv_freq"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def heads(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head of a part of the vocabulary and one of the whole."""
    target: FrozenTarget = load_target(
        str(target_dir), dtype=torch.float32, device=torch.device("cpu"), aux_layer_ids=(1, 3, 7)
    )
    place = tmp_path_factory.mktemp("heads")
    save_head(place / "part", target)
    save_head(place / "whole", target, target.vocab_size)
    return {name: place / name for name in ("part", "whole")}


def config(**values: Any) -> Damage:
    return lambda directory: change_config(directory, **values)


def tensors(change: Callable[[Tensors], Tensors]) -> Damage:
    return lambda directory: change_tensors(directory, change)


def added(**extra: torch.Tensor) -> Damage:
    return tensors(lambda t: t | {name.replace("__", "."): value for name, value in extra.items()})


def lost(*names: str) -> Damage:
    return tensors(lambda t: {name: value for name, value in t.items() if name not in names})


def both(*damages: Damage) -> Damage:
    def damage(directory: Path) -> None:
        for one in damages:
            one(directory)

    return damage


def own_embedding(value: float) -> Damage:
    return tensors(lambda t: t | {"embed_tokens.weight": torch.full((len(t["t2d"]), 32), value)})


def empty_second_map(t: Tensors) -> Tensors:
    return t | {"t2d": torch.zeros(len(t["lm_head.weight"]), dtype=torch.bool)}


QK_NORMS = {f"midlayer.self_attn.{part}_norm.weight": torch.ones(8) for part in "qk"}


def absolute_ids_alone(t: Tensors) -> Tensors:
    return {name: value for name, value in t.items() if name != "t2d"} | {"d2t": t["d2t"] + torch.arange(V_D)}


# What is done to which head; what becomes of it, or the option that loading and export refuse it for.
CASES: dict[str, tuple[str, Damage, str]] = {
    "nothing": ("part", config(), SOUND),
    "nothing, the whole vocabulary": ("whole", config(), SOUND),
    "no rms_norm_eps": ("part", config(rms_norm_eps=None), SOUND),
    "no rotary base": ("part", config(rope_theta=None), SOUND),
    "no position limit": ("part", config(max_position_embeddings=None), SOUND),
    "no key-value heads, as many as heads": ("part", config(num_key_value_heads=None), FAULT),
    "no size of heads": ("part", config(head_dim=None), SOUND),
    "no draft vocabulary where it is a part": ("part", config(draft_vocab_size=None), FAULT),
    "no draft vocabulary where it is the whole": ("whole", config(draft_vocab_size=None), SOUND),
    "no kind of model": ("part", config(model_type=None), SOUND),
    "another class": ("part", config(architectures=["Mystery"]), SOUND),
    "no dtype": ("part", config(torch_dtype=None), SOUND),
    "a null target width": ("part", config(target_hidden_size=None), SOUND),
    "no number of layers": ("part", config(num_hidden_layers=None), FAULT),
    "no hidden size": ("part", config(hidden_size=None), FAULT),
    "no MLP width": ("part", config(intermediate_size=None), FAULT),
    "no heads": ("part", config(num_attention_heads=None), FAULT),
    "no vocabulary": ("part", config(vocab_size=None), FAULT),
    "heads that cannot share": ("part", config(num_key_value_heads=3), FAULT),
    "heads of an odd size": ("part", config(head_dim=7), FAULT),
    "a draft vocabulary above the whole": ("part", config(draft_vocab_size=500), FAULT),
    "layers that fall": ("part", config(**{IDS_KEY: [7, 3, 1]}), FAULT),
    "a layer below 0": ("part", config(**{IDS_KEY: [-1, 3, 7]}), FAULT),
    "a table of frequencies": ("part", added(**{INV_FREQ: torch.ones(4)}), SOUND),
    "its own embedding": ("part", own_embedding(1.0), SOUND),
    "an embedding of zeros": ("part", own_embedding(0.0), FAULT),
    "another rotary base": ("part", config(rope_theta=5e5), SOUND),
    "two rotary scalings": (
        "part", config(rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "yarn"}), FAULT,
    ),
    "an embedding of another shape": ("part", added(embed_tokens__weight=torch.ones(5, 32)), FAULT),
    "a prefixed embedding": ("part", added(model__embed_tokens__weight=torch.ones(5, 32)), FAULT),
    "weights of zeros": ("part", added(lm_head__weight=torch.zeros(V_D, 32)), FAULT),
    "quantised weights": ("part", added(lm_head__weight=torch.ones(V_D, 32).to(torch.int8)), FAULT),
    "a norm of zeros": ("part", added(norm__weight=torch.zeros(32)), FAULT),
    "a norm of the layer of zeros": ("part", added(midlayer__hidden_norm__weight=torch.zeros(32)), FAULT),
    "a norm without numbers": ("part", added(norm__weight=torch.full((32,), float("nan"))), FAULT),
    "one surplus bias": ("part", added(fc__bias=torch.zeros(32)), FAULT),
    "no second map": ("part", lost("t2d"), SOUND),
    "no first map": ("part", lost("d2t"), FAULT),
    "no output head": ("part", lost("lm_head.weight"), FAULT),
    "a map of floats": ("part", tensors(lambda t: t | {"d2t": t["d2t"].float()}), FAULT),
    "a map of floats alone": (
        "part", both(lost("t2d"), tensors(lambda t: t | {"d2t": t["d2t"].float()})), FAULT,
    ),
    "a map of complex numbers": (
        "part", both(lost("t2d"), tensors(lambda t: t | {"d2t": t["d2t"].to(torch.complex64)})), FAULT,
    ),
    "a map of truths": ("part", tensors(lambda t: t | {"d2t": t["d2t"].bool()}), FAULT),
    "the whole vocabulary's maps": (
        "whole", tensors(lambda t: t | {"d2t": torch.zeros(len(t["lm_head.weight"]), dtype=torch.int32)}),
        SOUND,
    ),
    "sizes that no tensor has": ("part", config(intermediate_size=2**24), FAULT),
    "heads too many to be laid out": (
        "part", config(num_attention_heads=2**24, num_key_value_heads=2), FAULT,
    ),
    "absolute ids alone": ("part", tensors(absolute_ids_alone), FAULT),
    "a second map that disagrees": ("part", tensors(lambda t: t | {"t2d": t["t2d"].roll(1)}), FAULT),
    "a second map alone that marks nothing": ("whole", tensors(empty_second_map), FAULT),
    "a shared output head": ("whole", lost("lm_head.weight"), "it has no lm_head.weight"),
    "four layers": (
        "part", both(config(**{IDS_KEY: [1, 3, 5, 7]}), added(fc__weight=torch.ones(32, 128))), "reads 4 aux",
    ),
    "a normed residual": ("part", config(norm_before_residual=True), "norm_before_residual is true"),
    "a nested option": ("part", config(eagle_config={"norm_output": True}), "norm_output is true"),
    "an option that is set in one place of two": (
        "part", config(norm_output=False, eagle_config={"norm_output": True}), "norm_output is true",
    ),
    "neutral options": (
        "part", config(partial_rotary_factor=1.0, logit_scale=1, eagle_config={"use_aux_hidden_state": True}),
        SOUND,
    ),
    "rotation of a part": ("part", config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "rotation of a part, nested": (
        "part", config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5",
    ),
    "one state alone": (
        "part", config(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is False",
    ),
    "scaled logits": ("part", config(logit_scale=-1), "logit_scale is -1"),
    "quantisation": ("part", config(quantization_config={"quant_method": "fp8"}), "quantization_config is"),
    "another family": ("part", config(model_type="gemma2"), "model_type is gemma2"),
    "another activation": ("part", config(hidden_act="gelu"), "hidden_act is gelu"),
    "scaled rotation": ("part", config(rope_scaling={"rope_type": "linear"}), "rotary scaling of type"),
    "a window": ("part", config(use_sliding_window=True, sliding_window=64), "slides over 64"),
    "normed queries": ("part", both(config(model_type="qwen3"), added(**QK_NORMS)), "model_type is qwen3"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "verdict"), CASES.values(), ids=CASES)
def test_check_load_and_export_agree(
    kind: str, damage: Damage, verdict: str, heads: dict[str, Path], tmp_path: Path
) -> None:
    head = copy_of(heads[kind], tmp_path / "head")
    damage(head)
    assert check_draft_head(head).is_sound == (verdict != FAULT)
    if verdict == SOUND:
        loaded = load_draft_head(head)
        export_draft_head(head, "vllm", tmp_path / "out")
        assert check_draft_head(tmp_path / "out").is_sound
        assert load_draft_head(tmp_path / "out").config == loaded.config
        return
    for attempt in (load_draft_head, lambda path: export_draft_head(path, "vllm", tmp_path / "out")):
        with pytest.raises(InputError) as refusal:
            attempt(head)
        assert verdict == FAULT or verdict in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("error")
def test_a_map_of_complex_numbers_is_not_cast(heads: dict[str, Path], tmp_path: Path) -> None:
    head = copy_of(heads["part"], tmp_path / "head")
    change_tensors(head, lambda t: t | {"d2t": t["d2t"].to(torch.complex64)})
    assert [f.text for f in check_draft_head(head).findings] == [
        "d2t is complex64; it must hold whole numbers"
    ]
    with pytest.raises(InputError, match="d2t is complex64"):
        load_draft_head(head)


@pytest.mark.parametrize("key", sorted({**NEUTRAL, **NEUTRAL_EAGLE3}))
def test_every_option_of_the_table_is_refused_and_told(
    key: str, heads: dict[str, Path], tmp_path: Path
) -> None:
    """At the top level and in eagle_config, and not where its value changes nothing."""
    neutral = {**NEUTRAL, **NEUTRAL_EAGLE3}[key]
    value = (not neutral) if isinstance(neutral, bool) else {"x": 7} if neutral == {} else 7
    places = ({key: value}, True), ({"eagle_config": {key: value}}, True), ({key: neutral}, False)
    for number, (values, is_told) in enumerate(places):
        head = copy_of(heads["part"], tmp_path / f"{number}")
        change_config(head, **values)
        stored = read_stored_head(head)
        assert any(text.startswith(f"{key} is ") for text in unsupported(stored)) == is_told
        texts = [finding.text for finding in check_draft_head(head).findings]
        assert any(text.startswith(f"{key} is ") for text in texts) == is_told


def test_an_absent_epsilon_is_the_one_that_engines_take(heads: dict[str, Path], tmp_path: Path) -> None:
    head = copy_of(heads["part"], tmp_path / "head")
    change_config(head, rms_norm_eps=None)
    assert load_draft_head(head).config.rms_norm_eps == 1e-6
    texts = [finding.text for finding in check_draft_head(head).findings]
    assert any("no rms_norm_eps: engines take 1e-06" in text for text in texts)


def test_a_nested_config_without_an_epsilon_is_not_for_llamacpp(
    heads: dict[str, Path], target_dir: Path, tmp_path: Path
) -> None:
    """Its converter fills in LlamaConfig's for a flat config only, and its server takes no GGUF without."""
    export_draft_head(heads["part"], "speculators", tmp_path / "out", str(target_dir))
    layer = config_in(tmp_path / "out")["transformer_layer_config"]
    del layer["rms_norm_eps"]
    change_config(tmp_path / "out", transformer_layer_config=layer)
    verdicts = check_draft_head(tmp_path / "out").verdicts
    assert (verdicts["vllm"].verdict, verdicts["llamacpp"].verdict) == ("loads", "refused")


def test_a_table_of_frequencies_is_named_and_left_out(heads: dict[str, Path], tmp_path: Path) -> None:
    head = copy_of(heads["part"], tmp_path / "head")
    change_tensors(head, lambda t: t | {INV_FREQ: torch.ones(4)})
    report = check_draft_head(head)
    assert [finding.text for finding in report.findings] == [
        f"{INV_FREQ}: no weight but a table that is computed anew; it is skipped"
    ]
    assert report.verdicts["llamacpp"].verdict == report.verdicts["vllm"].verdict == "loads"
    assert report.verdicts["tensorrt-llm"].verdict == "not known"


def test_a_shared_output_head_is_told_with_the_remedy(heads: dict[str, Path], tmp_path: Path) -> None:
    head = copy_of(heads["whole"], tmp_path / "head")
    lost("lm_head.weight")(head)
    remedy = "put that into"
    assert any(remedy in finding.text for finding in check_draft_head(head).findings)
    with pytest.raises(InputError, match=remedy):
        load_draft_head(head)


def test_a_lost_number_of_layers_is_a_fault_with_each_engine_s_answer(
    heads: dict[str, Path], tmp_path: Path
) -> None:
    """What engines did with such a copy of the probe's head."""
    head = copy_of(heads["part"], tmp_path / "head")
    drop_config(head, "num_hidden_layers")
    verdicts = check_draft_head(head).verdicts
    assert verdicts["vllm"].verdict == "loads but wrong"
    assert verdicts["openvino"].verdict == verdicts["llamacpp"].verdict == "refused"


def test_layers_in_an_odd_eagle_config_are_read_past(heads: dict[str, Path], tmp_path: Path) -> None:
    head = copy_of(heads["part"], tmp_path / "head")
    change_config(head, eagle_config=5)
    assert check_draft_head(head).is_sound
