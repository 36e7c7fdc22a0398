"""Checkpoints: the index followed tensor by tensor, heads tied and not, damage refused, memory bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import DTYPES, Tensors, model_tensors, tiny_config, write_json, write_model_folder

from slora_ref.checkpoint import ModelWeights, load_checkpoint, random_weights
from slora_ref.checkpoint.tensors import MAX_HEADER_BYTES, float_dtype, read_header
from slora_ref.config import ModelConfig
from slora_ref.errors import CheckpointError, ConfigError, UnsupportedModel
from slora_ref.reference import Reference

T0 = tiny_config()
TIED = tiny_config(tie_word_embeddings=True)
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assert_equals(weights: ModelWeights, tensors: Tensors, config: ModelConfig = T0) -> None:
    """Every tensor of a checkpoint is at its place, merged where weights are merged."""

    def joined(layer: int, names: str, kind: str = "weight") -> np.ndarray:
        return np.concatenate([tensors[f"model.layers.{layer}.{name}.{kind}"] for name in names.split()])

    assert np.array_equal(weights.embed, tensors[EMBED])
    assert np.array_equal(weights.norm, tensors["model.norm.weight"])
    assert np.array_equal(weights.lm_head, tensors.get(HEAD, tensors[EMBED]))
    for i, layer in enumerate(weights.layers):
        assert np.array_equal(layer.input_norm, joined(i, "input_layernorm"))
        assert np.array_equal(layer.post_norm, joined(i, "post_attention_layernorm"))
        assert np.array_equal(layer.qkv, joined(i, "self_attn.q_proj self_attn.k_proj self_attn.v_proj"))
        assert np.array_equal(layer.o, joined(i, "self_attn.o_proj"))
        assert np.array_equal(layer.gate_up, joined(i, "mlp.gate_proj mlp.up_proj"))
        assert np.array_equal(layer.down, joined(i, "mlp.down_proj"))
        if config.attention_bias:
            bias = joined(i, "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "bias")
            assert layer.qkv_bias is not None and np.array_equal(layer.qkv_bias, bias)
    assert len(weights.layers) == config.num_layers


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the weight_map of an index."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


# --- which tensors count ---


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_lands_in_its_place(tmp_path: Path, shards: int, dtype: str) -> None:
    config = tiny_config(head_dim=32, attention_bias=True, mlp_bias=True)
    write_model_folder(tmp_path, config, shards=shards, dtype=dtype)
    stored = {name: value.astype(DTYPES[dtype]) for name, value in model_tensors(config, 0).items()}
    exact = {name: value.astype(np.float32) for name, value in stored.items()}
    assert_equals(load_checkpoint(tmp_path, config), exact, config)
    assert load_checkpoint(tmp_path, config, dtype).layers[1].qkv.dtype == DTYPES[dtype]
    assert_equals(load_checkpoint(tmp_path, config, dtype), stored, config)


def test_stray_copies_and_stray_files_change_nothing(tmp_path: Path) -> None:
    """Only the tensors that the index names count, each from the file that it names."""
    write_model_folder(tmp_path, T0)
    second = load_file(tmp_path / SHARDS[1])
    assert EMBED not in second
    old = {EMBED: np.full((97, 64), 7, np.float32), "model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    save_file(second | old, tmp_path / SHARDS[1])
    save_file({EMBED: old[EMBED]}, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert_equals(load_checkpoint(tmp_path, T0), model_tensors(T0, 0))


def test_the_index_decides_which_copy_wins(tmp_path: Path) -> None:
    write_model_folder(tmp_path, T0)
    other = np.full((97, 64), 7, np.float32)
    save_file(load_file(tmp_path / SHARDS[1]) | {EMBED: other}, tmp_path / SHARDS[1])
    edit_index(tmp_path, lambda names: names.update({EMBED: SHARDS[1]}))
    assert_equals(load_checkpoint(tmp_path, T0), model_tensors(T0, 0) | {EMBED: other})


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_model_folder(tmp_path, T0, seed=1)
    write_model_folder(tmp_path, T0, seed=2, shards=1)
    assert_equals(load_checkpoint(tmp_path, T0), model_tensors(T0, 2))


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path, T0)
    edit_index(tmp_path, lambda names: names.update({EMBED: SHARDS[1]}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.*model-00002"):
        load_checkpoint(tmp_path, T0)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", "a\0.safetensors", 3]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, file: object) -> None:
    write_model_folder(tmp_path / "model", T0)
    save_file(model_tensors(T0, 0), tmp_path / "x.safetensors")
    edit_index(tmp_path / "model", lambda names: names.update({EMBED: file}))
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(tmp_path / "model", T0)
    assert str(refusal.value).isprintable()


def test_files_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "blobs", T0)
    (tmp_path / "model").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    assert_equals(load_checkpoint(tmp_path / "model", T0), model_tensors(T0, 0))


@pytest.mark.parametrize(
    ("file", "hint"), [("pytorch_model.bin", "bin"), ("consolidated.safetensors", "consol"), ("x", "neither")]
)
def test_a_folder_without_safetensors_is_refused_and_no_pickle_is_opened(tmp_path: Path, file: str, hint: str) -> None:
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(CheckpointError, match=hint):
        load_checkpoint(tmp_path, T0)


# --- tied heads ---


def test_tied_heads_share_one_array(tmp_path: Path) -> None:
    weights = load_checkpoint(write_model_folder(tmp_path, TIED), TIED)
    assert weights.lm_head is weights.embed


def test_a_tied_head_that_is_in_the_file_too_is_the_same_array_if_equal(tmp_path: Path) -> None:
    tensors = model_tensors(TIED, 0)
    write_model_folder(tmp_path, TIED, tensors=tensors | {HEAD: tensors[EMBED]})
    weights = load_checkpoint(tmp_path, TIED)
    assert weights.lm_head is weights.embed


def test_a_tied_head_that_differs_in_the_file_is_used_as_transformers_does(tmp_path: Path) -> None:
    tensors = model_tensors(TIED, 0)
    write_model_folder(tmp_path, TIED, tensors=tensors | {HEAD: tensors[EMBED] + 1})
    weights = load_checkpoint(tmp_path, TIED)
    assert np.array_equal(weights.lm_head, tensors[EMBED] + 1) and np.array_equal(weights.embed, tensors[EMBED])


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = model_tensors(TIED, 0)
    write_model_folder(tmp_path, T0, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        load_checkpoint(tmp_path, T0)


def test_a_tied_model_without_embedding_and_head_is_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in model_tensors(TIED, 0).items() if name != EMBED}
    write_model_folder(tmp_path, TIED, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*missing"):
        load_checkpoint(tmp_path, TIED)


# --- shapes and leftovers ---


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_padded_rows_are_kept_and_missing_rows_are_refused(tmp_path: Path, name: str) -> None:
    """The engine masks ids from vocab_size on; a head shorter than the vocabulary cannot be served."""
    tensors = model_tensors(T0, 0)
    padded = np.concatenate([tensors[name], np.full((31, 64), 9, np.float32)])
    weights = load_checkpoint(write_model_folder(tmp_path / "more", T0, tensors=tensors | {name: padded}), T0)
    assert np.array_equal(weights.embed if name == EMBED else weights.lm_head, padded)
    write_model_folder(tmp_path / "less", T0, tensors=tensors | {name: tensors[name][:96]})
    with pytest.raises(CheckpointError, match=r"\(96, 64\).*97 or more"):
        load_checkpoint(tmp_path / "less", T0)


@pytest.mark.parametrize(
    "name", [name for name in model_tensors(T0, 0) if "layers.1" in name or name == "model.norm.weight"]
)
def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path, name: str) -> None:
    tensors = model_tensors(T0, 0)
    shape = tensors[name].shape
    write_model_folder(tmp_path, T0, tensors=tensors | {name: np.ones((*shape[:-1], shape[-1] + 1), np.float32)})
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(tmp_path, T0)
    assert name in str(refusal.value) and str(shape) in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.qweight",
        "lm_head.bias",
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path, name: str) -> None:
    write_model_folder(tmp_path, T0, tensors=model_tensors(T0, 0) | {name: np.ones(64, np.float32)})
    with pytest.raises(UnsupportedModel, match=name):
        load_checkpoint(tmp_path, T0)


def test_tensors_of_no_consequence_are_passed_over(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "optimizer.step": np.ones(1)}
    write_model_folder(tmp_path, T0, tensors=model_tensors(T0, 0) | extra)
    assert_equals(load_checkpoint(tmp_path, T0), model_tensors(T0, 0))


def test_biases_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    write_model_folder(tmp_path, T0)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias.*missing"):
        load_checkpoint(tmp_path, tiny_config(attention_bias=True))


def test_biases_change_the_logits(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    weights = load_checkpoint(write_model_folder(tmp_path, config), config)
    bare = load_checkpoint(write_model_folder(tmp_path / "bare", T0), T0)
    ids = [95, 1, 2, 3]
    assert abs(Reference(config, weights).logits(ids) - Reference(T0, bare).logits(ids)).max() > 0.1


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_a_stored_type_that_is_not_served_is_refused_by_name(tmp_path: Path, dtype: type) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = write_model_folder(tmp_path, T0, shards=1)
    save_file(model_tensors(T0, 0) | {name: np.ones((96, 64)).astype(dtype)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=name):
        load_checkpoint(tmp_path, T0)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (np.inf, "float32"), (1e6, "float16")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: str) -> None:
    tensors = model_tensors(T0, 0)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    write_model_folder(tmp_path, T0, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*NaN or infinity"):
        load_checkpoint(tmp_path, T0, dtype)
    if np.isfinite(value):
        load_checkpoint(tmp_path, T0, "bfloat16")


def test_a_dtype_that_weights_cannot_have_is_refused() -> None:
    assert float_dtype("bfloat16") == ml_dtypes.bfloat16 and float_dtype(np.float16) == np.float16
    for dtype in (np.int32, "int8", "complex64"):
        with pytest.raises(ConfigError, match="not supported"):
            float_dtype(dtype)


# --- damaged files ---


def header_bytes(length: int, header: object, data: bytes = b"") -> bytes:
    """A safetensors file with a stated length of its header."""
    return length.to_bytes(8, "little") + json.dumps(header).encode() + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2^60 bytes": header_bytes(1 << 60, {}),
    "header longer than the file": header_bytes(100, {"a": ONE}, b"\0" * 8),
    "zero header": header_bytes(0, {}),
    "no JSON": (8).to_bytes(8, "little") + b"\xff" * 8,
    "a list": header_bytes(2, []),
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "NaN": header_bytes(9, 0)[:8] + b'{"a":NaN}',
    "no entry": header_bytes(len(json.dumps({"a": 3})), {"a": 3}),
    "unknown type": header_bytes(
        len(json.dumps({"a": ONE | {"dtype": "F3"}})), {"a": ONE | {"dtype": "F3"}}, b"\0" * 8
    ),
}


def one_tensor(**changes: object) -> bytes:
    """A file of one tensor whose entry is changed."""
    header = {"a": ONE | changes}
    return header_bytes(len(json.dumps(header)), header, b"\0" * 8)


BAD_ENTRIES: list[dict[str, object]] = [
    {"shape": [3]},
    {"shape": [-2]},
    {"shape": [True, 2]},
    {"shape": [2.0]},
    {"shape": "2"},
    {"shape": [1] * 9 + [2]},
    {"shape": [1 << 62, 1 << 62]},
    {"data_offsets": [0, 4]},
    {"data_offsets": [4, 12]},
    {"data_offsets": [-8, 0]},
    {"data_offsets": [8, 0]},
    {"data_offsets": [0]},
    {"data_offsets": None},
    {"dtype": None},
]


@pytest.mark.parametrize("data", [*DAMAGED.values(), *(one_tensor(**bad) for bad in BAD_ENTRIES)])
def test_a_damaged_header_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        read_header(tmp_path / "x.safetensors", CheckpointError)
    assert "x.safetensors" in str(refusal.value) and str(refusal.value).isprintable()


def test_a_header_over_the_limit_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES * 4)
    with pytest.raises(CheckpointError, match=f"header of {MAX_HEADER_BYTES + 1} bytes"):
        read_header(tmp_path / "x.safetensors", CheckpointError)


def test_overlapping_holey_and_repeated_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    second = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    for header, size in (
        ({"a": ONE, "b": ONE}, 8),
        ({"a": ONE, "b": ONE}, 16),
        ({"a": second}, 16),
        ({"a": ONE}, 16),
        ({"a": ONE, "b": second}, 15),
    ):
        path.write_bytes(header_bytes(len(json.dumps(header)), header, b"\0" * size))
        with pytest.raises(CheckpointError, match="damaged"):
            read_header(path, CheckpointError)
    twice = f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(second)}}}'.encode()
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + b"\0" * 16)
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(path, CheckpointError)
    good = {"b": second, "a": ONE}
    path.write_bytes(header_bytes(len(json.dumps(good)), good, b"\0" * 16))
    assert list(read_header(path, CheckpointError).tensors) == ["b", "a"]


def test_a_truncated_shard_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    write_model_folder(tmp_path, T0)
    size = (tmp_path / SHARDS[1]).stat().st_size
    for keep in (size - 1, size // 2, 100, 4, 0):
        os.truncate(tmp_path / SHARDS[1], keep)
        with pytest.raises(CheckpointError, match="model-00002"):
            load_checkpoint(tmp_path, T0)


def test_a_fifo_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path, T0)


# --- memory ---

MEASURE = """
import sys
sys.path.insert(0, "tests")
from tiny import peak_bytes
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
config = ModelConfig.from_folder(sys.argv[1])
before = peak_bytes()
weights = load_checkpoint(sys.argv[1], config, sys.argv[2])
print(peak_bytes() - before)
"""


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_loading_peaks_at_no_more_than_1_2_times_the_weights(tmp_path: Path, stored: str) -> None:
    config = tiny_config(vocab_size=32000, hidden_size=512, intermediate_size=2048, num_layers=6, head_dim=128)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes(config).items()}
    write_model_folder(tmp_path, config, dtype=stored, tensors=tensors)
    size = sum(value.nbytes for value in tensors.values()) * (1 if stored == "float32" else 0.5)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), stored]
    root = str(Path(__file__).parents[1])
    peak = float(subprocess.run(command, capture_output=True, check=True, cwd=root, text=True).stdout)
    assert 0.5 * size < peak <= 1.2 * size


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a model without biases."""
    tiny = model_tensors(tiny_config(num_layers=config.num_layers, vocab_size=8), 0)
    found: dict[str, tuple[int, ...]] = {}
    for name in tiny:
        target = name.split(".")[-2]
        if name in (EMBED, HEAD):
            found[name] = (config.vocab_size, config.hidden_size)
        elif target.endswith("_proj"):
            found[name] = config.target_shape(target)[::-1]
        else:
            found[name] = (config.hidden_size,)
    return found


# --- random weights ---


def test_random_weights_follow_seed_and_config() -> None:
    config = tiny_config(attention_bias=True, tie_word_embeddings=True)
    one, again, other = (random_weights(config, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.layers[1].down, again.layers[1].down)
    assert not np.array_equal(one.layers[1].down, other.layers[1].down)
    assert one.lm_head is one.embed and one.layers[0].qkv_bias is not None and one.layers[0].down_bias is None
    assert random_weights(T0, 0, "bfloat16").layers[0].qkv.dtype == ml_dtypes.bfloat16
    assert random_weights(T0, 0).lm_head is not random_weights(T0, 0).embed


@pytest.mark.parametrize("layers", [1, 8])
def test_random_weights_give_logits_of_ordinary_size(layers: int) -> None:
    config = tiny_config(num_layers=layers)
    logits = Reference(config, random_weights(config, 0)).logits([95, 3, 60, 7])
    assert 1 < abs(logits).max() < 20
