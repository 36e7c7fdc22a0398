"""PEFT adapters: the scale, PEFT's pattern rule, partial targets, refusals by name, damage. Faults of area A."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny import TARGETS, adapter_tensors, module_name, tiny_config, write_adapter_folder

from slora_ref.adapter import AdapterHeader, load_adapter, read_header
from slora_ref.adapter.header import HeaderReader
from slora_ref.adapter.options import IDLE, READ, REFUSED
from slora_ref.adapter.patterns import Names
from slora_ref.errors import AdapterError, SloraError, UnsupportedAdapter

T0 = tiny_config()
Q, V, DOWN = TARGETS.index("q_proj"), TARGETS.index("v_proj"), TARGETS.index("down_proj")
WEIGHTS = "adapter_model.safetensors"


def header_of(path: Path, *args: Any, config: Any = T0, **options: Any) -> AdapterHeader:
    """Write an adapter folder and read its header."""
    return read_header(write_adapter_folder(path, config, *args, **options), config)


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replace tensors of an adapter by the end of their name (dots as __); None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for ending, value in changes.items():
        name = next(name for name in tensors if name.endswith(ending.replace("__", ".") + ".weight"))
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS)


# --- the scale is computed once, at parse ---


def test_rank_stabilised_adapters_have_their_own_scale(tmp_path: Path) -> None:
    """A server that always divides by r would make them weaker by sqrt(r), without a word."""
    plain = header_of(tmp_path / "plain", 16, lora_alpha=16, use_rslora=False)
    stable = header_of(tmp_path / "stable", 16, lora_alpha=16, use_rslora=True)
    assert np.all(plain.scales == 1.0) and np.all(stable.scales == 4.0)
    assert plain.scales.dtype == stable.scales.dtype == np.float32


def test_every_module_has_the_scale_of_its_own_rank_and_alpha(tmp_path: Path) -> None:
    ranks = {(0, "q_proj"): 4, (0, "down_proj"): 9, (1, "q_proj"): 16}
    for stable in (False, True):
        header = header_of(tmp_path, ranks, lora_alpha=3, use_rslora=stable, alpha_pattern={"down_proj": 64})
        root = math.sqrt if stable else float
        assert header.scales[0, Q] == np.float32(3 / root(4)) and header.scales[1, Q] == np.float32(3 / root(16))
        assert header.scales[0, DOWN] == np.float32(64 / root(9))
        assert np.count_nonzero(header.scales) == np.count_nonzero(header.ranks) == 3


def test_the_scale_is_in_no_copy_of_the_weights(tmp_path: Path) -> None:
    """Load, load again: the same bits, those of the file, and nobody can change them in place."""
    header = header_of(tmp_path, 8, lora_alpha=16)
    tensors = load_file(tmp_path / WEIGHTS)
    for adapter in (load_adapter(header, T0), load_adapter(header, T0)):
        for (layer, target), a in adapter.a.items():
            name = f"base_model.model.{module_name(layer, TARGETS[target])}"
            b = adapter.b[layer, target]
            assert np.array_equal(a, tensors[f"{name}.lora_A.weight"])
            assert np.array_equal(b, tensors[f"{name}.lora_B.weight"])
            for array in (a, b, header.ranks, header.scales):
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0


# --- rank_pattern and alpha_pattern: PEFT's own rule ---


def peft_rule(table: dict[str, Any], module: str, general: Any) -> Any:
    """The rule as PEFT states it, by Python's matcher."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), general)


@pytest.mark.parametrize(
    ("rank_pattern", "layer_0", "layer_1"),
    [
        ({"layers.1.self_attn.q_proj": 4, "q_proj": 2}, 2, 4),
        ({"q_proj": 2, "layers.1.self_attn.q_proj": 4}, 2, 2),
        ({"1.self_attn.q_proj": 4}, 8, 4),
        ({r".*\.(0|1)\.self_attn\.[qk]_proj": 3}, 3, 3),
        ({"^model.layers.0.self_attn.q_proj": 5, "q_proj": 6}, 5, 6),
        ({"model.layers.0.self_attn.q_proj$": 5}, 5, 8),
    ],
)
def test_the_first_key_that_matches_to_the_end_wins(
    tmp_path: Path, rank_pattern: dict[str, int], layer_0: int, layer_1: int
) -> None:
    ranks = {(0, "q_proj"): layer_0, (1, "q_proj"): layer_1}
    header = header_of(tmp_path, ranks, r=8, rank_pattern=rank_pattern)
    assert list(header.ranks[:, Q]) == [layer_0, layer_1]
    for layer in range(2):
        assert header.ranks[layer, Q] == peft_rule(rank_pattern, module_name(layer, "q_proj"), 8)
    with pytest.raises(AdapterError, match=r"q_proj: lora_A is"):
        header_of(tmp_path, {(0, "q_proj"): layer_0 + 1, (1, "q_proj"): layer_1}, r=8, rank_pattern=rank_pattern)


def test_a_key_for_layer_1_does_not_hit_layer_11(tmp_path: Path) -> None:
    config = tiny_config(num_layers=12)
    ranks = {(layer, "q_proj"): 4 if layer == 1 else 8 for layer in range(12)}
    header = header_of(tmp_path, ranks, config=config, r=8, rank_pattern={"1.self_attn.q_proj": 4})
    assert list(header.ranks[:, Q]) == [4 if layer == 1 else 8 for layer in range(12)]


def test_keys_that_match_nothing_are_warned_of(tmp_path: Path) -> None:
    header = header_of(tmp_path, 8, rank_pattern={"proj": 4, "model.layers.1": 2, "q_proj": 8})
    assert np.all(header.ranks == 8)
    [warning] = header.warnings
    assert re.search(r"rank_pattern: 2 keys match no module.*proj.*model\.layers\.1", warning)


@pytest.mark.parametrize(
    ("prefix", "alpha"), [("base_model.model.", 60), ("base_model.model.model.", 80), ("", 60), ("model.", 80)]
)
def test_patterns_see_the_names_of_the_model_that_was_trained(tmp_path: Path, prefix: str, alpha: float) -> None:
    """PEFT on a LlamaModel, which has no head, names its modules layers.0..., and a pattern from ^ on sees it."""
    alphas = {"^layers.0.self_attn.q_proj": 60, "^model.layers.0.self_attn.q_proj": 80}
    folder = write_adapter_folder(tmp_path, T0, 8, alpha_pattern=alphas)
    rename(folder, lambda name: name.replace("base_model.model.model.", prefix))
    header = read_header(folder, T0)
    assert header.scales[0, Q] == alpha / 8 and len(header.warnings) == 1
    assert np.all(np.delete(header.scales.ravel(), Q) == header.scales[1, Q])


def test_names_of_both_kinds_are_refused(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    rename(folder, lambda name: name.replace("model.layers.1.", "layers.1."))
    with pytest.raises(AdapterError, match="name all in one way"):
        read_header(folder, T0)


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Gives the tensors of an adapter other names."""
    tensors = load_file(folder / WEIGHTS)
    save_file({change(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def test_a_pattern_that_the_file_contradicts_is_refused_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as refusal:
        header_of(tmp_path, 8, rank_pattern={"0.self_attn.v_proj": 4})
    message = str(refusal.value)
    assert "model.layers.0.self_attn.v_proj" in message and "[8, 64]" in message and "[4, 64]" in message


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", None, True, 1 << 40])
def test_a_rank_that_is_no_rank_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(AdapterError, match=r"rank_pattern|: r is"):
        header_of(tmp_path, 8, rank_pattern={"q_proj": value})
    if value is not None:
        with pytest.raises(AdapterError, match="r is"):
            header_of(tmp_path, 8, r=value)


@pytest.mark.parametrize("value", ["16", [16], True, float("nan"), float("inf")])
def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(AdapterError, match="lora_alpha"):
        header_of(tmp_path, 8, lora_alpha=value)
    with pytest.raises(AdapterError, match="alpha_pattern"):
        header_of(tmp_path, 8, alpha_pattern={"q_proj": value})


# --- patterns are followed in bounded time ---

NAMES = [module_name(layer, target) for layer in range(12) for target in TARGETS] + ["lm_head"]
PIECES = st.sampled_from(
    r"""model layers \. . .* .*? .+ \d \d+ [0-9]+ [qkv] [^.] [^.]+ (q|k|v) (?:self_attn|mlp) _proj q_proj down ^ $
    \b \w+ (1|11)? 1? (.*\.)? [a-z_]{3,9} \d{1,2} (?:layers\.)+ | \S* \D (a|)* (?:\.\d){0,2}""".split()
)


@given(st.lists(PIECES, min_size=1, max_size=7).map("".join))
def test_patterns_match_what_pythons_matcher_matches(pattern: str) -> None:
    try:
        wanted = {name for name in NAMES if re.fullmatch(pattern, name)}
    except re.error:
        with pytest.raises(UnsupportedAdapter):
            Names(NAMES).fullmatch(pattern)
        return
    assert Names(NAMES).fullmatch(pattern) == wanted


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k)_proj",
        r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers)",
    ],
)
def test_patterns_that_people_use_match_something(pattern: str) -> None:
    assert Names(NAMES).fullmatch(pattern) == {name for name in NAMES if re.fullmatch(pattern, name)} != set()


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a|a)*b",
        r"(.*)*x",
        r"(.|.)*(.|.)*(.|.)*(.|.)*y",
        r"((((((.*)*)*)*)*)*)*$z",
        r"(?:.*.*.*.*.*.*.*.*.*.*)y",
        r"((?:){99999}){99999}",
        r"(x+x+)+y",
        "." * 4096,
        "(" * 2000 + ")" * 2000,
        r"(?=.*q).*",
        r"(.)\1",
        r"(?i)Q_PROJ",
        r"[",
        "a" * 5000,
    ],
)
def test_hostile_patterns_cost_no_time(tmp_path: Path, pattern: str) -> None:
    """Python's own matcher would need hours for some of these."""
    folder = write_adapter_folder(tmp_path, T0, 8)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change in ({"target_modules": pattern}, {"rank_pattern": {pattern: 8}}, {"exclude_modules": pattern}):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        started = time.perf_counter()
        try:
            read_header(folder, T0)
        except SloraError as refusal:
            assert str(refusal).isprintable()
        assert time.perf_counter() - started < 5  # with shape checks on; the fuzz without them asks for 1


# --- which modules ---


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "v_proj"), ("v_proj",), ("gate_proj",), ("down_proj",)])
def test_any_subset_of_targets_loads(tmp_path: Path, targets: tuple[str, ...]) -> None:
    header = header_of(tmp_path, 8, targets)
    assert {TARGETS[i] for i in np.nonzero(header.ranks)[1]} == set(targets)
    assert header.matched == header.total == 2 * len(targets) and not header.warnings


SELECTIONS: list[tuple[dict[str, Any], int]] = [
    ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 1]}, 4),
    ({"target_modules": ["q_proj", "o_proj"]}, 4),
    ({"target_modules": "{'q_proj', 'o_proj'}", "layers_to_transform": None}, 4),
    ({"target_modules": "[q_proj, o_proj]", "layers_to_transform": None}, 4),
    ({"target_modules": r".*(0.*q_proj|1.*o_proj)", "layers_to_transform": None}, 2),
    ({"target_modules": "all-linear", "layers_to_transform": None}, 14),
    ({"target_modules": "ALL-LINEAR", "layers_to_transform": []}, None),
    ({"target_modules": ["model.layers.0.self_attn.q_proj", "1.self_attn.o_proj"]}, 2),
]


@pytest.mark.parametrize(("options", "total"), SELECTIONS)
def test_target_modules_in_every_form(tmp_path: Path, options: dict[str, Any], total: int | None) -> None:
    """q in layer 0 and o in layer 1: the tensors are the truth, what is absent adds exactly 0."""
    ranks = {(0, "q_proj"): 8, (1, "o_proj"): 8}
    if total is None:
        with pytest.raises(AdapterError, match="layers_to_transform"):
            header_of(tmp_path, ranks, **options)
        return
    header = header_of(tmp_path, ranks, **options)
    assert (header.matched, header.total) == (2, total)
    assert header.ranks.tolist() == [[8, 0, 0, 0, 0, 0, 0], [0, 0, 0, 8, 0, 0, 0]]
    assert bool(header.warnings) == (total > 2)


def test_with_no_target_modules_the_file_is_the_truth(tmp_path: Path) -> None:
    """PEFT reads null as q_proj and v_proj, and would drop the rest: that is said."""
    header = header_of(tmp_path / "fits", 8, ("q_proj", "v_proj"), target_modules=None)
    assert header.matched == header.total == 4 and not header.warnings
    more = header_of(tmp_path / "more", 8, ("q_proj", "v_proj", "down_proj"), target_modules=None)
    assert more.matched == more.total == 6 and "null" in more.warnings[0]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": []},
        {"target_modules": "q_proj"},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
        {"exclude_modules": ["v_proj"]},
        {"exclude_modules": r".*\.1\..*"},
    ],
)
def test_a_file_with_modules_that_the_config_leaves_out_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """PEFT would pass over them in silence, and the adapter would act too weakly."""
    with pytest.raises(AdapterError, match=r"module model\.layers.*target_modules"):
        header_of(tmp_path, 8, ("q_proj", "v_proj"), **options)


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("middle", ["", ".default"])
def test_key_names_with_and_without_prefix_and_default(tmp_path: Path, prefix: str, middle: str) -> None:
    ranks = {(0, "q_proj"): 8, (1, "down_proj"): 8}
    tensors = adapter_tensors(T0, ranks, 0, prefix=prefix)
    renamed = {name.replace(".weight", f"{middle}.weight"): value for name, value in tensors.items()}
    header = header_of(tmp_path, ranks, tensors=renamed)
    assert header.matched == 2
    assert np.array_equal(
        load_adapter(header, T0).a[0, Q], tensors[f"{prefix}{module_name(0, 'q_proj')}.lora_A.weight"]
    )


def test_a_half_under_two_names_is_refused(tmp_path: Path) -> None:
    ranks = {(0, "q_proj"): 8}
    both = adapter_tensors(T0, ranks, 0) | adapter_tensors(T0, ranks, 1, prefix="")
    with pytest.raises(AdapterError, match="second name"):
        header_of(tmp_path, ranks, tensors=both)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_types(tmp_path: Path, dtype: str) -> None:
    header = header_of(tmp_path, {(0, "q_proj"): 3, (1, "v_proj"): 5}, dtype=dtype)
    assert header.dtype == dtype
    stored, wide = load_adapter(header, T0, None), load_adapter(header, T0)
    assert stored.a[0, Q].dtype.name == dtype and wide.a[0, Q].dtype == np.float32
    assert np.array_equal(stored.b[1, V].astype(np.float32), wide.b[1, V])
    assert load_adapter(header, T0, "bfloat16").a[0, Q].dtype == ml_dtypes.bfloat16
    assert wide.a[0, Q].shape == (3, 64) and wide.b[0, Q].shape == (64, 3)


def test_types_may_be_mixed(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    edit_tensors(folder, layers__0__self_attn__q_proj__lora_A=np.ones((8, 64), np.float16))
    assert read_header(folder, T0).dtype == "mixed"


# --- refused from the config, by name, before weights are read ---

CHANGING: dict[str, Any] = {
    "peft_type": "ADALORA",
    "task_type": "SEQ_CLS",
    "bias": "all",
    "use_dora": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2], [1, 2]],
    "target_parameters": ["mlp.experts"],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {},
    "kasa_config": {},
    "monteclora_config": {},
    "velora_config": {},
    "megatron_config": {"tensor_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_change_the_function_are_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8, **{name: CHANGING[name]})
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedAdapter, match=name):
        read_header(folder, T0)
    for harmless in REFUSED[name][0]:
        assert header_of(tmp_path, 8, **{name: harmless}).matched == 14


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new", 3])
def test_initialisations_that_changed_the_base_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UnsupportedAdapter, match=r"init_lora_weights.*base weights"):
        header_of(tmp_path, 8, init_lora_weights=value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "orthogonal", "eva", "mica"])
def test_initialisations_that_kept_the_base_load(tmp_path: Path, value: object) -> None:
    assert header_of(tmp_path, 8, init_lora_weights=value, eva_config={"rho": 2.0}).matched == 14


@pytest.mark.parametrize("value", [1, "x", [0], {"a": 1}, True])
def test_an_unknown_option_is_refused_unless_it_is_empty(tmp_path: Path, value: object) -> None:
    with pytest.raises(UnsupportedAdapter, match="use_tomorrows_lora"):
        header_of(tmp_path, 8, use_tomorrows_lora=value)
    for empty in (None, False, [], {}, "", 0):
        assert header_of(tmp_path, 8, use_tomorrows_lora=empty).matched == 14


def test_idle_options_change_nothing(tmp_path: Path) -> None:
    idle = {"lora_dropout": 0.5, "fan_in_fan_out": True, "inference_mode": False, "ensure_weight_tying": True}
    header = header_of(tmp_path, 8, **idle, loftq_config={"bits": 4}, megatron_core="x", qalora_group_size=4)
    assert np.array_equal(header.scales, header_of(tmp_path, 8).scales)


@pytest.mark.oracle
def test_every_field_of_the_installed_peft_is_in_one_group() -> None:
    import dataclasses

    import peft

    groups = [*READ, *IDLE, *REFUSED, "init_lora_weights"]
    assert len(groups) == len(set(groups))
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= set(groups)


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_lora_on_head_or_embedding_is_refused(tmp_path: Path, name: str) -> None:
    """A head of a tied model would change the embedding's rows too."""
    for targets in (["q_proj", name], rf".*({name}|q_proj)"):
        with pytest.raises(UnsupportedAdapter, match="head or embedding"):
            header_of(tmp_path, 8, ("q_proj",), target_modules=targets, layers_to_transform=None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "bias"),
        ("base_model.model.lm_head.lora_A.weight", "head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        ("base_model.model.model.embed_tokens.weight", "embedding"),
        ("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "seven targets"),
        ("base_model.model.model.layers.0.self_attn.gate_proj.lora_A.weight", "seven targets"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "seven targets"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight", "seven targets"),
    ],
)
def test_tensors_that_are_no_lora_of_the_seven_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    save_file(load_file(folder / WEIGHTS) | {name: np.ones((8, 64), np.float32)}, folder / WEIGHTS)
    with pytest.raises(UnsupportedAdapter, match=reason) as refusal:
        read_header(folder, T0)
    assert name[:40] in str(refusal.value)


# --- damage ---


def test_a_pickle_is_refused_and_never_opened(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path / "a", T0, 8)
    marker = tmp_path / "marker"
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(marker).encode())
    with pytest.raises(UnsupportedAdapter, match="pickle"):
        read_header(folder, T0)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_proj__lora_A": None}, ["layers.", "q_proj", "lora_B is in the file, lora_A is not"]),
        ({"down_proj__lora_B": None}, ["down_proj", "lora_A is in the file, lora_B is not"]),
        ({"q_proj__lora_A": np.ones((8, 63), np.float32)}, ["q_proj", "[8, 63]", "[8, 64]"]),
        ({"q_proj__lora_A": np.ones((64, 8), np.float32)}, ["q_proj", "[64, 8]", "[8, 64]"]),
        ({"q_proj__lora_B": np.ones((64, 9), np.float32)}, ["q_proj", "[64, 9]", "[64, 8]"]),
        ({"q_proj__lora_A": np.ones((0, 64), np.float32)}, ["q_proj", "[0, 64]", "[8, 64]"]),
        ({"q_proj__lora_A": np.ones((8, 64, 1), np.float32)}, ["q_proj", "[8, 64, 1]"]),
        ({"q_proj__lora_A": np.ones((8, 64), np.float64)}, ["q_proj", "F64"]),
        ({"q_proj__lora_A": np.ones((8, 64), np.int8)}, ["q_proj", "I8"]),
    ],
)
def test_wrong_shapes_types_and_missing_halves_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    edit_tensors(folder, **changes)
    with pytest.raises((AdapterError, UnsupportedAdapter)) as refusal:
        read_header(folder, T0)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, tiny_config(head_dim=32), 8)
    with pytest.raises(AdapterError, match=r"_proj: lora_A is .* ask for "):
        read_header(folder, T0)
    with pytest.raises(AdapterError, match=r"layers\.2\..*has 2 layers"):
        read_header(write_adapter_folder(tmp_path, tiny_config(num_layers=3), 8), T0)


def test_nothing_loads_with_nothing_matched(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="nothing would be changed"):
        header_of(tmp_path, 8, tensors={})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_at_load(tmp_path: Path, value: float) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    bad = np.ones((64, 8), np.float32)
    bad[5, 3] = value
    edit_tensors(folder, layers__1__self_attn__q_proj__lora_B=bad)
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj\.lora_B: NaN or infinity"):
        load_adapter(read_header(folder, T0), T0)


def test_a_number_that_the_wanted_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    header = header_of(tmp_path, 8, sd=1e6)
    load_adapter(header, T0)
    with pytest.raises(AdapterError, match="NaN or infinity"):
        load_adapter(header, T0, "float16")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    size = (folder / WEIGHTS).stat().st_size
    for keep in (size - 1, size - 5000, 2000, 100, 8, 7, 0):
        os.truncate(folder / WEIGHTS, keep)
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
            read_header(folder, T0)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_missing_files_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_adapter_folder(tmp_path, T0, 8)
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=re.escape(name)):
        read_header(folder, T0)


# --- between registration and first use ---


def test_a_folder_that_vanishes_fails_this_load_alone(tmp_path: Path) -> None:
    header, other = header_of(tmp_path / "a", 8), header_of(tmp_path / "b", 8)
    (tmp_path / "a" / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=WEIGHTS):
        load_adapter(header, T0)
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="adapter_config"):
        load_adapter(header, T0)
    assert load_adapter(other, T0).a


@pytest.mark.parametrize("change", [{"seed": 9}, {"lora_alpha": 99}, {"rank_or_ranks": 4}])
def test_a_folder_that_changes_is_refused_until_registered_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    header = header_of(tmp_path, 8, seed=1)
    write_adapter_folder(tmp_path, T0, **({"rank_or_ranks": 8, "seed": 1} | change))
    os.utime(tmp_path / WEIGHTS, ns=(header.fingerprint[0] + 5, header.fingerprint[0] + 5))
    with pytest.raises(AdapterError, match="changed since it was registered"):
        load_adapter(header, T0)
    assert load_adapter(read_header(tmp_path, T0), T0).a


def test_a_config_that_changes_alone_is_noticed(tmp_path: Path) -> None:
    header = header_of(tmp_path, 8)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | {"lora_alpha": 1}))
    with pytest.raises(AdapterError, match="changed since it was registered"):
        load_adapter(header, T0)


def test_loading_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    header = header_of(tmp_path, 8)
    before = hashlib.sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest()
    load_adapter(header, T0)
    assert hashlib.sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest() == before
    assert header.fingerprint == read_header(tmp_path, T0).fingerprint


def _copy_with_its_time(folder: Path) -> None:
    """As a backup is played back: another file, the same content, the same time of modification."""
    shutil.copy2(folder / WEIGHTS, folder / "copy")
    (folder / "copy").replace(folder / WEIGHTS)


@pytest.mark.parametrize(
    "touch",
    [
        lambda folder: (folder / WEIGHTS).chmod(0o600),
        lambda folder: os.link(folder / WEIGHTS, folder / "backup"),
        lambda folder: (folder / WEIGHTS).rename(folder / "away") and (folder / "away").rename(folder / WEIGHTS),
        _copy_with_its_time,
    ],
    ids=["chmod", "a backup of hard links", "moved and moved back", "a backup played back"],
)
def test_what_leaves_the_content_alone_leaves_the_adapter_usable(
    tmp_path: Path, touch: Callable[[Path], object]
) -> None:
    """Class of fault: the check for changes looks at the inode, and `chmod -R` makes every reload fail."""
    header = header_of(tmp_path, 8)
    before = load_adapter(header, T0)
    touch(tmp_path)
    assert read_header(tmp_path, T0).fingerprint != header.fingerprint
    assert np.array_equal(load_adapter(header, T0).b[0, Q], before.b[0, Q])


@pytest.mark.parametrize("rank", [1, 8])
def test_other_weights_with_the_same_time_and_size_are_noticed(tmp_path: Path, rank: int) -> None:
    """Written over the file or moved to its place, with the time of modification set back."""
    header = header_of(tmp_path / "x", rank, seed=1)
    other = write_adapter_folder(tmp_path / "other", T0, rank, seed=2) / WEIGHTS
    weights, time_before = tmp_path / "x" / WEIGHTS, header.fingerprint.modified_ns
    for put in (lambda: weights.write_bytes(other.read_bytes()), lambda: other.replace(weights)):
        put()
        os.utime(weights, ns=(time_before, time_before))
        assert weights.stat().st_size == header.fingerprint.size
        with pytest.raises(AdapterError, match="changed since it was registered"):
            load_adapter(header, T0)


def test_what_one_folder_says_is_not_said_of_another(tmp_path: Path) -> None:
    """A HeaderReader remembers texts: a folder of equal size and names, but another config or header, is read anew."""
    reader = HeaderReader(T0)
    alphas = [1, 2, 1]
    for i, alpha in enumerate(alphas):
        write_adapter_folder(tmp_path / str(i), T0, 8, seed=i, lora_alpha=alpha)
    headers = [reader.inspect(tmp_path / str(i))[0] for i in range(3)]
    assert [header.scales.max() for header in headers] == [alpha / 8 for alpha in alphas]
    assert [header.path.name for header in headers] == ["0", "1", "2"]
    assert headers[0].ranks is headers[2].ranks and headers[0].fingerprint != headers[2].fingerprint
    (tmp_path / "0" / "adapter_config.json").write_text('{"use_dora": true}')
    with pytest.raises(UnsupportedAdapter, match="use_dora"):
        reader.inspect(tmp_path / "0")


# --- cost ---

MEASURE = """
import sys, time
sys.path.insert(0, "tests")
from tiny import tiny_config
from slora_ref.adapter import read_header
config = tiny_config(num_layers=int(sys.argv[2]))
def run(times):
    started = time.process_time()
    for _ in range(times):
        read_header(sys.argv[1], config)
    return (time.process_time() - started) / times
run(5)
print(min(run(20) for _ in range(5)))
"""


@pytest.mark.parametrize(("layers", "limit"), [(2, 1e-3), (32, 6e-3)])
def test_registering_costs_about_a_millisecond(tmp_path: Path, layers: int, limit: float) -> None:
    """10,000 adapters register in under 20 s: a config and a header each, no weights, no patterns to follow."""
    config = tiny_config(num_layers=layers)
    write_adapter_folder(tmp_path, config, 8, TARGETS[:4])
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(layers)]
    root = str(Path(__file__).parents[1])
    assert float(subprocess.run(command, capture_output=True, check=True, cwd=root, text=True).stdout) < limit


def test_patterns_for_every_module_of_a_large_model_are_affordable(tmp_path: Path) -> None:
    config = tiny_config(num_layers=80)
    ranks = {(layer, target): 1 + (layer + i) % 9 for layer in range(80) for i, target in enumerate(TARGETS)}
    started = time.perf_counter()
    header = header_of(
        tmp_path, ranks, config=config, alpha_pattern={f"^{module_name(*m)}": r for m, r in ranks.items()}
    )
    assert header.matched == 560 and np.all(header.scales == 1.0)
    assert time.perf_counter() - started < 5
