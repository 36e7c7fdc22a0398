"""config.json and generation_config.json: every spelling of what is served, and refusals by name of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden.cases import LLAMA3, YARN, rope_spellings
from tiny import config_json, tiny_config, write_model_folder

from slora_ref.config import TARGETS, ModelConfig, RopeConfig
from slora_ref.errors import CheckpointError, CheckpointWarning, UnsupportedModel


def parse(**changes: Any) -> ModelConfig:
    """T0's config.json with some fields changed."""
    return ModelConfig.from_dict(config_json(tiny_config()) | changes)


def without(*names: str, **changes: Any) -> ModelConfig:
    """T0's config.json with some fields left out."""
    values = config_json(tiny_config()) | changes
    return ModelConfig.from_dict({name: value for name, value in values.items() if name not in names})


def test_a_folder_reads_as_the_config_it_was_written_from(tmp_path: Path) -> None:
    config = tiny_config(head_dim=32, attention_bias=True, rope=RopeConfig("linear", 5e5, 2.0))
    write_model_folder(tmp_path, config)
    assert ModelConfig.from_folder(tmp_path) == config


def test_target_shapes_use_head_dim_not_hidden_over_heads() -> None:
    config = tiny_config(head_dim=32)
    shapes = {target: config.target_shape(target) for target in TARGETS}
    assert shapes["q_proj"] == (64, 128) and shapes["o_proj"] == (128, 64)
    assert shapes["k_proj"] == shapes["v_proj"] == (64, 64)
    assert shapes["gate_proj"] == shapes["up_proj"] == (64, 96) and shapes["down_proj"] == (96, 64)


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    config = without("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig("default", 10000.0) and not config.tie_word_embeddings
    assert without("bos_token_id", "eos_token_id").eos_token_ids == (2,)
    assert without("bos_token_id").bos_token_id == 1
    assert parse(bos_token_id=None, eos_token_id=None).eos_token_ids == ()
    assert without("torch_dtype", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_size_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        without(name)


@pytest.mark.parametrize("value", [0, -1, 2.0, "64", True, [64], 10**40, None])
def test_a_size_of_the_wrong_kind_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedModel, match="hidden_size"):
        parse(hidden_size=value)


# --- end tokens ---


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    write_model_folder(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 96], "bos_token_id": 7}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == (5, 96) and config.bos_token_id == 7


@pytest.mark.parametrize("values", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
def test_a_generation_config_without_end_tokens_leaves_those_of_the_config(tmp_path: Path, values: Any) -> None:
    write_model_folder(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (96,)


def test_rules_of_generation_that_would_change_greedy_answers_are_told(tmp_path: Path) -> None:
    """They are each request's to choose; a folder that counts on them must not lose them in silence."""
    write_model_folder(tmp_path, tiny_config())
    told = {"repetition_penalty": 1.1, "suppress_tokens": [3], "do_sample": True, "temperature": 0.6, "min_length": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    with pytest.warns(CheckpointWarning, match=r"repetition_penalty = 1.1, suppress_tokens = \[3\] has no effect"):
        assert ModelConfig.from_folder(tmp_path) == tiny_config()


def test_a_folder_with_model_and_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would load both as one model; the base model alone would be a wrong answer."""
    write_model_folder(tmp_path, tiny_config())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="a folder of their own"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("value", [-1, [1, -1], "2", [True], 1.0])
def test_end_tokens_that_are_no_ids_are_refused(value: object) -> None:
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        parse(eos_token_id=value)


# --- RoPE ---

ROPES = [
    (RopeConfig("linear", 5e5, 4.0), {"rope_type": "linear", "factor": 4.0}),
    (RopeConfig("llama3", 5e5, 8.0, 64), {"rope_type": "llama3", **LLAMA3}),
    (RopeConfig("yarn", 5e5, 4.0, 64), {"rope_type": "yarn", **YARN}),
]


@pytest.mark.parametrize(("rope", "block"), ROPES)
def test_rope_is_read_in_every_spelling(rope: RopeConfig, block: dict[str, Any]) -> None:
    for spelling in rope_spellings(block, 5e5):
        values = config_json(tiny_config()) | {"rope_theta": 5e5} | dict(spelling)
        assert ModelConfig.from_dict({k: v for k, v in values.items() if v != "<absent>"}).rope == rope


@pytest.mark.parametrize("block", [None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 5e5}])
def test_no_rope_scaling_is_the_plain_rope(block: object) -> None:
    assert parse(rope_scaling=block, rope_theta=5e5).rope == RopeConfig("default", 5e5)
    assert parse(rope_parameters=block, rope_theta=5e5).rope == RopeConfig("default", 5e5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk", "", None, 3, "Linear"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_rope_that_is_not_served_is_refused_and_never_ignored(kind: object, key: str) -> None:
    with pytest.raises(UnsupportedModel, match="RoPE of kind") as refusal:
        parse(rope_scaling={key: kind, "factor": 2.0})
    assert ascii(kind) in str(refusal.value)


def test_dynamic_rope_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"dynamic.*keys already in the cache would be wrong"):
        parse(rope_scaling={"type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": float("nan")}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("linear", "rope"),
    ],
)
def test_rope_options_that_cannot_be_followed_are_refused_by_name(block: object, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        parse(rope_scaling=block)


def test_partial_rotation_beside_the_block_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        parse(partial_rotary_factor=0.25)
    assert parse(partial_rotary_factor=1.0) == tiny_config()


# --- features ---


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "qwen2"}, "model_type"),
        ({"model_type": "mixtral"}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 1e-3}}}, "per_layer_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        parse(**changes)


def test_neutral_values_of_the_same_fields_load() -> None:
    neutral: dict[str, Any] = {"quantization_config": None, "layer_types": ["full_attention"] * 2, "auto_map": {}}
    neutral |= {"hidden_act": "swish", "final_logit_softcapping": None, "logits_scaling": 1.0, "pretraining_tp": 2}
    neutral |= {"is_causal": True, "per_layer_config": None}
    assert parse(**neutral, use_cache=False, attention_dropout=0.1, some_new_field=3) == tiny_config()


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "mistral", "sliding_window": 512}, True),
        ({"model_type": "mistral", "sliding_window": 4096}, True),
        ({"model_type": "mistral", "sliding_window": 511}, False),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, False),  # then transformers assumes 4096
        ({"model_type": "mistral"}, True),  # 4096 cannot take effect within 512 positions
        ({"sliding_window": 100}, False),
        ({"model_type": "mistral", "sliding_window": None, "attention_bias": True}, False),
    ],
)
def test_a_sliding_window_is_refused_when_it_can_take_effect(changes: dict[str, Any], served: bool) -> None:
    if served:
        assert parse(**changes) == tiny_config()
    else:
        with pytest.raises(UnsupportedModel, match=r"sliding_window|attention_bias"):
            parse(**changes)


def test_mistral_without_kv_heads_has_eight() -> None:
    wide = {"model_type": "mistral", "num_attention_heads": 16, "sliding_window": None}
    assert without("num_key_value_heads", **wide).num_kv_heads == 8
    assert parse(**wide, num_key_value_heads=None).num_kv_heads == 16


# --- files ---


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"a":' * 100_000, "[" * 100_000, "\ud800", '{"a": ' + "9" * 5000 + "}"]
)
def test_a_config_that_is_no_json_object_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError) as refusal:
        ModelConfig.from_folder(tmp_path)
    assert "config.json" in str(refusal.value) and str(refusal.value).isprintable()


def test_a_missing_folder_file_or_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_messages_of_hostile_values_are_short_and_printable() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        parse(model_type="x\n\x1b[31m\ud800" * 10_000)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 300
