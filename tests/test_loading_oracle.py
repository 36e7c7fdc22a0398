"""Random configs: whatever slora_ref and transformers (or peft) both read, they read the same. Run by `make oracle`.

The golden files fix the spellings that are known; here options are combined at random, so that a rule of precedence or
of matching that nobody thought of shows. Each side may refuse what the other reads.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import TARGETS, config_json, tiny_config, write_adapter_folder

import slora_ref
from slora_ref.adapter import AdapterHeader, load_adapter, read_header
from slora_ref.config import ModelConfig
from slora_ref.errors import SloraError
from slora_ref.rope import inverse_frequencies

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
often = settings(max_examples=1500, suppress_health_check=list(HealthCheck))


def fields(**choices: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that have some of the fields, each with one of its choices."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in choices.items()})


IDLE = set(
    "transformers_version output_hidden_states return_dict chunk_size_feed_forward id2label label2id problem_type "
    "initializer_range use_cache pad_token_id pretraining_tp attention_dropout".split()
)
"""Fields of transformers' configs that steer training, the shape of its answers, or nothing."""


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig"])
def test_every_field_that_transformers_has_is_read_refused_or_known_to_be_idle(name: str) -> None:
    """A field that a newer transformers adds may change the logits, and would be passed over in silence."""
    import transformers

    package = Path(slora_ref.__file__).parent / "config"
    source = "".join((package / file).read_text(encoding="utf-8") for file in ("model.py", "rope.py"))
    there = {field.name for field in dataclasses.fields(getattr(transformers, name))}
    assert not {field for field in there - IDLE if f'"{field}"' not in source}


KINDS = ["default", "linear", "yarn", "llama3"]
ropes = fields(
    type=KINDS,
    rope_type=KINDS,
    factor=[None, 1, 2.0, 8, 0.5],
    original_max_position_embeddings=[None, 64, 2048],
    low_freq_factor=[1, 2.0],
    high_freq_factor=[4.0, 8],
    attention_factor=[None, 0.5, 1],
    beta_fast=[None, 0, 16],
    beta_slow=[None, 0, 2.0],
    mscale=[None, 0, 0.7],
    mscale_all_dim=[None, 0, 1.3],
    truncate=[True, False, None],
    rope_theta=[1e4, 500000],
)
rope_blocks = st.fixed_dictionaries(
    {}, optional={"rope_scaling": st.none() | ropes, "rope_parameters": st.none() | ropes}
)
others = fields(
    rope_theta=[1e4, 1000000],
    original_max_position_embeddings=[32, 64],
    head_dim=[None, 16, 32],
    num_key_value_heads=[1, 2, 4],
    num_attention_heads=[4, 8],
    tie_word_embeddings=[True, False],
    rms_norm_eps=[1e-5, 1e-6],
    max_position_embeddings=[64, 512],
    eos_token_id=[None, 2, [2, 3], []],
    bos_token_id=[None, 1],
    attention_bias=[True, False],
    mlp_bias=[True, False],
    model_type=["llama", "mistral"],
    sliding_window=[None, 16, 4096],
)
left_out = st.lists(st.sampled_from([name for name in config_json(tiny_config()) if name != "model_type"]), max_size=3)


@often
@given(rope=rope_blocks, other=others, without=left_out)
def test_configs_mean_what_transformers_takes_them_for(
    tmp_path_factory: pytest.TempPathFactory, rope: dict[str, Any], other: dict[str, Any], without: list[str]
) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {name: value for name, value in config_json(tiny_config()).items() if name not in without} | other | rope
    if values["model_type"] == "mistral":
        values = {name: value for name, value in values.items() if not name.endswith("_bias")}
        values["architectures"] = ["MistralForCausalLM"]
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(values))
    try:
        ours = ModelConfig.from_folder(folder)
    except SloraError:
        return
    try:
        theirs = AutoConfig.from_pretrained(folder)
        rotary = LlamaRotaryEmbedding(theirs)
    except Exception:  # noqa: BLE001 - what transformers raises has no common base
        return
    pairs = [(ours.vocab_size, theirs.vocab_size), (ours.head_dim, theirs.head_dim), (ours.dtype, "float32")]
    pairs += [(ours.num_heads, theirs.num_attention_heads), (ours.num_kv_heads, theirs.num_key_value_heads)]
    pairs += [(ours.rms_norm_eps, theirs.rms_norm_eps), (ours.tie_word_embeddings, theirs.tie_word_embeddings)]
    pairs += [(ours.attention_bias, getattr(theirs, "attention_bias", False)), (ours.bos_token_id, theirs.bos_token_id)]
    ends = [theirs.eos_token_id] if isinstance(theirs.eos_token_id, int) else theirs.eos_token_id or []
    pairs += [(ours.mlp_bias, getattr(theirs, "mlp_bias", False)), (list(ours.eos_token_ids), ends)]
    assert [one for one, _ in pairs] == [other for _, other in pairs]
    frequencies, scale = inverse_frequencies(ours)
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=3e-6)
    assert scale == pytest.approx(rotary.attention_scaling)


PATTERNS = st.sampled_from(
    r"""q_proj v_proj proj layers.1.self_attn.q_proj 1.self_attn.q_proj ^model.layers.0.mlp.down_proj model.layers.1 .*
    0.* self_attn.* .*\.mlp\.(up|down)_proj q|v (q|v)_proj q_proj|v_proj a)|(q_proj mlp.down_proj$ ^q_proj""".split()
)
NAMES = [*TARGETS, "self_attn.q_proj", "model.layers.0.self_attn.q_proj", "1.mlp.down_proj", "proj", "_proj"]
EXPRESSIONS = (
    r"all-linear .*_proj q_proj .*q_proj|.*down_proj model\.layers\.0\..*_proj .*layers.*proj lm_head|.*v_proj"
)
options = st.fixed_dictionaries(
    {},
    optional={
        "target_modules": st.lists(st.sampled_from(NAMES), max_size=8) | st.sampled_from(EXPRESSIONS.split()),
        "exclude_modules": st.lists(st.sampled_from(NAMES), max_size=2)
        | st.sampled_from([None, ".*v_proj", ".*[.]0[.].*"]),
        "rank_pattern": st.dictionaries(PATTERNS, st.sampled_from([4, 8, 2]), max_size=2),
        "alpha_pattern": st.dictionaries(PATTERNS, st.sampled_from([4, 8.5, 0, -3]), max_size=3),
        "layers_to_transform": st.sampled_from([None, 0, [1], [0, 1], []]),
        "layers_pattern": st.sampled_from([None, "layers", ["layers"], ""]),
        "use_rslora": st.booleans(),
        "lora_alpha": st.sampled_from([16, 1, 0.5, 0, -2]),
        "init_lora_weights": st.sampled_from([True, "gaussian", "eva"]),
        "r": st.sampled_from([8, 4]),
    },
)
modules = st.tuples(st.integers(0, 1), st.sampled_from(TARGETS))


@pytest.fixture(scope="module")
def base() -> Any:
    """T0 in transformers, with weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = config_json(tiny_config())
    return LlamaForCausalLM(LlamaConfig(**{name: values[name] for name in values if name != "architectures"})).eval()


@often
@given(ranks=st.dictionaries(modules, st.sampled_from([8, 8, 4]), min_size=1, max_size=6), chosen=st.just({}) | options)
def test_adapters_mean_what_peft_takes_them_for(
    tmp_path_factory: pytest.TempPathFactory, base: Any, ranks: dict[tuple[int, str], int], chosen: dict[str, Any]
) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    folder = write_adapter_folder(tmp_path_factory.mktemp("adapter"), tiny_config(), ranks, seed=1, **chosen)
    try:
        adapter = load_adapter(read_header(folder, tiny_config()), tiny_config())
    except SloraError:
        return
    try:
        tuned = PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    except (ValueError, TypeError, AttributeError, KeyError):
        return
    layers = {name: layer for name, layer in tuned.base_model.model.named_modules() if isinstance(layer, LoraLayer)}
    found = {(int(name.split(".")[2]), TARGETS.index(name.split(".")[-1])): layer for name, layer in layers.items()}
    assert set(adapter.a) <= set(found)
    for module, layer in found.items():
        assert_same(module, layer, adapter.header, adapter.a.get(module), adapter.b.get(module))


def assert_same(
    module: tuple[int, int], layer: Any, header: AdapterHeader, a: np.ndarray | None, b: np.ndarray | None
) -> None:
    """Rank, scale and weights of a module are peft's; a module that is not in the file adds 0 there too."""
    their_a, their_b = (half["default"].weight.detach().numpy() for half in (layer.lora_A, layer.lora_B))
    if a is None or b is None:
        assert header.ranks[module] == 0 and not their_b.any()
        return
    assert layer.r["default"] == header.ranks[module]
    assert layer.scaling["default"] == pytest.approx(float(header.scales[module]))
    assert np.array_equal(a, their_a) and np.array_equal(b, their_b)


def test_the_folders_of_these_tests_are_read_by_both(tmp_path: Path, base: Any) -> None:
    """Otherwise the comparisons above would compare nothing."""
    from peft import PeftModel
    from transformers import AutoConfig

    adapter = write_adapter_folder(tmp_path / "adapter", tiny_config(), 8)
    assert read_header(adapter, tiny_config()).matched == 14
    assert PeftModel.from_pretrained(copy.deepcopy(base), str(adapter))
    (tmp_path / "config.json").write_text(json.dumps(config_json(tiny_config())))
    assert AutoConfig.from_pretrained(tmp_path).head_dim == ModelConfig.from_folder(tmp_path).head_dim
