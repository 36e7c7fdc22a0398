"""The variants of checkpoints and adapters that must give the logits of transformers + peft.

Shared by tests/make_golden.py, which asks transformers and peft, and tests/test_golden.py, which asks slora_ref. A case
is one function (one set of logits); its spellings are folders that say the same thing in different words. Folders are
written from seeds, so only logits are committed, and the weights are pinned by their sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny import (
    TARGETS,
    Tensors,
    adapter_tensors,
    model_tensors,
    module_name,
    tiny_config,
    write_adapter_folder,
    write_model_folder,
)

from slora_ref.config import ModelConfig, RopeConfig

FOLDER = Path(__file__).parent
PROMPT_LENGTHS = (1, 23, 150)
NEW_TOKENS = 16
ABSENT = "<absent>"
"""As a value of config.json: leave the key out."""


def prompts() -> list[list[int]]:
    """The three prompts, the begin token first."""
    rng = np.random.default_rng(7)
    return [[95, *map(int, rng.integers(0, 95, length - 1))] for length in PROMPT_LENGTHS]


@dataclass(frozen=True)
class ModelCase:
    """A base model. Each spelling replaces keys of config.json; `stored` says how the tensors lie on disk."""

    name: str
    config: ModelConfig
    spellings: tuple[Mapping[str, Any], ...] = ({},)
    dtype: str = "float32"
    shards: int = 2
    tensors: str = "plain"

    def weights(self) -> Tensors:
        """The tensors as they are stored, float32 before rounding."""
        tensors = model_tensors(self.config, seed=3)
        if self.tensors == "tied and equal head":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        if self.tensors == "tied and other head":
            tensors["lm_head.weight"] = model_tensors(replace(self.config, tie_word_embeddings=False), 4)[
                "lm_head.weight"
            ]
        if self.tensors == "only the head of a tied pair":
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        if self.tensors == "no prefix":
            tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
        if self.tensors == "old buffers":
            for layer in range(self.config.num_layers):
                tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        return tensors

    def write(self, path: Path, spelling: int = 0) -> Path:
        """The folder in one of its spellings."""
        values = dict(self.spellings[spelling])
        folder = write_model_folder(
            path, self.config, shards=self.shards, dtype=self.dtype, config_values=values, tensors=self.weights()
        )
        drop_keys(folder / "config.json", [key for key, value in values.items() if value is ABSENT])
        return folder


@dataclass(frozen=True)
class AdapterCase:
    """An adapter on the model case `model`. Each spelling is more keywords for write_adapter_folder.

    Spellings with `ours_only` are read by slora_ref alone (peft would ignore their tensors or refuse them).
    """

    name: str
    model: str
    ranks: int | Mapping[tuple[int, str], int] = 8
    targets: tuple[str, ...] = TARGETS
    layers: tuple[int, ...] | None = None
    spellings: tuple[Mapping[str, Any], ...] = ({},)
    ours_only: tuple[Mapping[str, Any], ...] = ()
    dtype: str = "float32"
    keys: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path, config: ModelConfig, spelling: int = 0) -> Path:
        """The folder in one of its spellings, those of `ours_only` after the others."""
        options = dict((*self.spellings, *self.ours_only)[spelling])
        prefix, middle = options.pop("prefix", "base_model.model."), options.pop("middle", "")
        tensors = {}
        for name, value in adapter_tensors(config, self.all_ranks(config), seed=5, prefix=prefix).items():
            tensors[name.replace(".weight", f"{middle}.weight")] = value
        return write_adapter_folder(path, config, self.all_ranks(config), dtype=self.dtype, tensors=tensors, **options)

    def all_ranks(self, config: ModelConfig) -> dict[tuple[int, str], int]:
        """Rank of each (layer, target)."""
        if not isinstance(self.ranks, int):
            return dict(self.ranks)
        layers = range(config.num_layers) if self.layers is None else self.layers
        return {(layer, target): self.ranks for layer in layers for target in self.targets}


def drop_keys(path: Path, keys: list[str]) -> None:
    """Take keys out of a JSON file."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in keys}))


def rope_spellings(old: Mapping[str, Any], theta: float) -> tuple[Mapping[str, Any], ...]:
    """A rope in the three generations of config.json: `type`, `rope_type`, `rope_parameters`."""
    kind = old["rope_type"]
    first = {"type": kind, **{key: value for key, value in old.items() if key != "rope_type"}}
    new = {"rope_scaling": ABSENT, "rope_theta": ABSENT, "rope_parameters": {**old, "rope_theta": theta}}
    return {"rope_scaling": first}, {"rope_scaling": dict(old)}, new, {"rope_scaling": {**first, "rope_type": kind}}


def rope_case(name: str, rope: RopeConfig, old: Mapping[str, Any]) -> ModelCase:
    """T0 with a rope, spelled in every way."""
    return ModelCase(name, tiny_config(rope=rope), rope_spellings(old, rope.theta))


def sha256(tensors: Mapping[str, np.ndarray]) -> str:
    """A digest of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "attention_bias": ABSENT,
    "mlp_bias": ABSENT,
}
DEFAULTS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")

MODEL_CASES = (
    ModelCase("t0", tiny_config(), ({}, {"rope_scaling": ABSENT}, {"eos_token_id": [96, 5]}, {"torch_dtype": ABSENT})),
    ModelCase("one-file", tiny_config(num_layers=1), shards=1, tensors="old buffers"),
    ModelCase("t0h", tiny_config(head_dim=32)),
    ModelCase("multi-head", tiny_config(num_kv_heads=4), ({}, {"num_key_value_heads": None, "head_dim": None})),
    ModelCase("multi-query", tiny_config(num_kv_heads=1)),
    ModelCase("tied", tiny_config(tie_word_embeddings=True)),
    ModelCase("tied-with-head", tiny_config(tie_word_embeddings=True), tensors="tied and equal head"),
    ModelCase("tied-with-other-head", tiny_config(tie_word_embeddings=True), tensors="tied and other head"),
    ModelCase(
        "tied-head-only", tiny_config(tie_word_embeddings=True), tensors="only the head of a tied pair", shards=1
    ),
    ModelCase(
        "no-prefix", tiny_config(tie_word_embeddings=True), ({"architectures": ["LlamaModel"]},), tensors="no prefix"
    ),
    ModelCase("attention-bias", tiny_config(attention_bias=True)),
    ModelCase("all-biases", tiny_config(attention_bias=True, mlp_bias=True)),
    ModelCase("float16", tiny_config(), dtype="float16"),
    ModelCase("bfloat16", tiny_config(), ({}, {"torch_dtype": ABSENT, "dtype": "bfloat16"}), dtype="bfloat16"),
    ModelCase("padded-vocabulary", tiny_config(vocab_size=128)),
    ModelCase(
        "defaults",
        tiny_config(num_kv_heads=4, rms_norm_eps=1e-6),
        (dict.fromkeys((*DEFAULTS, "max_position_embeddings", "hidden_act", "attention_bias"), ABSENT),),
    ),
    ModelCase(
        "mistral",
        tiny_config(),
        (MISTRAL | {"sliding_window": None}, MISTRAL | {"sliding_window": 512}),
    ),
    ModelCase(
        "theta",
        tiny_config(rope=RopeConfig("default", 5e5)),
        (
            {},
            {"rope_scaling": {"type": "default"}},
            {
                "rope_scaling": ABSENT,
                "rope_theta": ABSENT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
    ),
    rope_case("rope-linear", RopeConfig("linear", 1e4, 4.0), {"rope_type": "linear", "factor": 4.0}),
    rope_case("rope-llama3", RopeConfig("llama3", 1e4, 8.0, 64), {"rope_type": "llama3", **LLAMA3}),
    rope_case("rope-yarn", RopeConfig("yarn", 1e4, 4.0, 64), {"rope_type": "yarn", **YARN}),
    rope_case(
        "rope-yarn-options",
        RopeConfig("yarn", 5e5, 4.0, 64, beta_fast=16.0, beta_slow=2.0, attention_factor=0.9, truncate=False),
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.9, "truncate": False},
    ),
    rope_case(
        "rope-yarn-mscale",
        RopeConfig("yarn", 1e4, 4.0, 64, mscale=0.7, mscale_all_dim=1.3),
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    ModelCase(
        "rope-yarn-lengths",
        tiny_config(rope=RopeConfig("yarn", 1e4, 8.0, 64)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings": 64},
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 64,
            },
        ),
    ),
)

Q, O = "q_proj", "o_proj"  # noqa: E741
MIXED = {
    (layer, target): 1 + (5 * layer + 3 * i) % 16
    for layer in range(2)
    for i, target in enumerate(TARGETS)
    if (layer + i) % 3
}
PATTERN = {"^model.layers.0.mlp.down_proj": 64}
ROPES = {
    f"{name}-{head_dim}": (head_dim, rope)
    for head_dim in (48, 80, 128)
    for name, rope in {
        "default": RopeConfig("default", 5e5),
        "small-theta": RopeConfig("default", 1e4),
        "linear": RopeConfig("linear", 1e4, 3.0),
        "llama3": RopeConfig("llama3", 5e5, 8.0, 8192),
        "yarn": RopeConfig("yarn", 1e4, 5.0, 64),
    }.items()
}
"""Name -> (head_dim, rope), for the bits of inv_freq."""

FULL = [module_name(layer, target) for layer in range(2) for target in TARGETS]
ADAPTER_CASES = (
    AdapterCase(
        "all-seven",
        "t0",
        spellings=(
            {},
            {"target_modules": "all-linear"},
            {"target_modules": r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"},
            {"target_modules": FULL},
            {"target_modules": r"model\.layers\.\d+\.(?:self_attn|mlp)\.[a-z]+_proj"},
            {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
            {"fan_in_fan_out": True, "lora_dropout": 0.1, "inference_mode": False},
            {"init_lora_weights": "gaussian", "peft_version": "0.21.2", "auto_mapping": None, "revision": None},
            {"init_lora_weights": "orthogonal"},
            {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
            {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
            {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"mlp.up_proj": 16}, "r": 8},
        ),
        ours_only=(
            {"prefix": ""},
            {"middle": ".default"},
            {"prefix": "", "middle": ".default"},
            {"target_modules": None},
            {"target_modules": "{'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'}"},
        ),
    ),
    AdapterCase("q", "t0", 4, (Q,), spellings=({}, {"target_modules": ".*q_proj"}, {"target_modules": "^.*q_proj$"})),
    AdapterCase("q-v", "t0", 8, (Q, "v_proj"), spellings=({}, {"target_modules": ".*[qv]_proj"})),
    AdapterCase("v", "t0", 8, ("v_proj",)),
    AdapterCase("o", "t0", 8, (O,)),
    AdapterCase("gate", "t0", 8, ("gate_proj",)),
    AdapterCase("down", "t0", 8, ("down_proj",), spellings=({}, {"target_modules": ["mlp.down_proj"]})),
    AdapterCase(
        "second-layer",
        "t0",
        8,
        layers=(1,),
        spellings=({}, {"layers_to_transform": 1}, {"layers_to_transform": None, "exclude_modules": r".*\.0\..*"}),
    ),
    AdapterCase(
        "q-in-0-o-in-1",
        "t0",
        {(0, Q): 8, (1, O): 8},
        spellings=({}, {"target_modules": r".*(0\.self_attn\.q_proj|1\.self_attn\.o_proj)"}),
    ),
    AdapterCase("rank-stabilised", "t0", 16, spellings=({"use_rslora": True, "lora_alpha": 16},)),
    AdapterCase("not-rank-stabilised", "t0", 16, spellings=({"use_rslora": False, "lora_alpha": 16},)),
    AdapterCase(
        "patterns",
        "t0",
        {(0, Q): 2, (1, Q): 4, (0, "down_proj"): 8, (1, "down_proj"): 8},
        spellings=(
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {"layers.1.self_attn.q_proj": 4, Q: 2},
                "alpha_pattern": PATTERN,
            },
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {r".*\.1\.self_attn\.q_proj": 4, r"self_attn\.[q]_proj": 2},
                "alpha_pattern": {r"0\.mlp\.(gate|down)_proj": 64},
            },
        ),
    ),
    AdapterCase(
        "patterns-swapped",
        "t0",
        {(0, Q): 2, (1, Q): 2, (0, "down_proj"): 8, (1, "down_proj"): 8},
        spellings=(
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {Q: 2, "layers.1.self_attn.q_proj": 4},
                "alpha_pattern": PATTERN,
            },
        ),
    ),
    AdapterCase("mixed-ranks", "t0", MIXED, spellings=({"use_rslora": True, "lora_alpha": 2.5},)),
    AdapterCase("stored-float16", "t0", 8, dtype="float16"),
    AdapterCase("stored-bfloat16", "t0", 8, dtype="bfloat16"),
    AdapterCase("on-t0h", "t0h", 8),
    AdapterCase("on-multi-query", "multi-query", 8),
    AdapterCase("on-tied", "tied", 8),
    AdapterCase("on-biases", "all-biases", 8, (Q, "v_proj", O, "down_proj")),
    AdapterCase("on-bfloat16", "bfloat16", 8),
    AdapterCase("on-mistral", "mistral", 8),
    AdapterCase("on-yarn", "rope-yarn", 8, (Q, "k_proj")),
)

SAVED = ("llama-shards", "mistral-tied", "llama-bfloat16")
"""Folders that transformers' and peft's own save_pretrained wrote, committed below tests/golden/saved."""
