"""Tiny models and adapters as real folders, from seeds: what a test loads instead of mocks.

T0 is `tiny_config()`: hidden 64, intermediate 96, 2 layers, 4 query heads, 2 KV heads of 16, 97 tokens, untied head,
two shards with an index. T0h is `tiny_config(head_dim=32)`. Adapters have a random, non-zero A and B, so that a delta
that is missing or misplaced moves every logit. The files are written with safetensors' and tokenizers' own writers,
never with the code under test.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from slora_ref.config import TARGETS, ModelConfig, RopeConfig

Tensors = dict[str, np.ndarray]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(**overrides: Any) -> ModelConfig:
    """Fixture T0 with some fields replaced."""
    base = ModelConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=95,
        eos_token_ids=(96,),
    )
    return replace(base, **overrides)


def block_of(target: str) -> str:
    """The part of a layer that holds a target: self_attn or mlp."""
    return "self_attn" if TARGETS.index(target) < 4 else "mlp"


def module_name(layer: int, target: str) -> str:
    """A target's module as transformers names it."""
    return f"model.layers.{layer}.{block_of(target)}.{target}"


def config_json(config: ModelConfig) -> dict[str, Any]:
    """`config` in the spelling of transformers 4 (rope_theta beside rope_scaling)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_json(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0],
        "torch_dtype": config.dtype,
    }


def rope_json(rope: RopeConfig) -> dict[str, Any] | None:
    """The rope_scaling block of a rope, with the key `rope_type`; None for the plain kind."""
    block: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        block |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        block |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.kind in ("llama3", "yarn"):
        block["original_max_position_embeddings"] = rope.original_positions
    return None if rope.kind == "default" else block


def model_tensors(config: ModelConfig, seed: int, bias_size: float = 1.0) -> Tensors:
    """All tensors of a checkpoint, float32, by transformers' names; y = x W.T + b."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, sd: float) -> np.ndarray:
        return (rng.standard_normal(shape) * sd).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(config.vocab_size, config.hidden_size, sd=1.0)}
    for layer in range(config.num_layers):
        for target in TARGETS:
            d_in, d_out = config.target_shape(target)
            tensors[f"{module_name(layer, target)}.weight"] = normal(d_out, d_in, sd=d_in**-0.5)
            if config.attention_bias if block_of(target) == "self_attn" else config.mlp_bias:
                tensors[f"{module_name(layer, target)}.bias"] = normal(d_out, sd=bias_size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + normal(config.hidden_size, sd=0.1)
    tensors["model.norm.weight"] = 1 + normal(config.hidden_size, sd=0.1)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(config.vocab_size, config.hidden_size, sd=2 * config.hidden_size**-0.5)
    return tensors


def write_model_folder(
    path: str | Path,
    config: ModelConfig,
    seed: int = 0,
    *,
    shards: int = 2,
    dtype: str = "float32",
    config_values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a checkpoint folder (config.json, safetensors, tokenizer.json) and return its path.

    `config_values` replaces keys of config.json; `tensors` replaces the random weights; one shard means one file.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = dict(tensors) if tensors is not None else model_tensors(config, seed)
    stored = {name: np.ascontiguousarray(value.astype(DTYPES[dtype])) for name, value in chosen.items()}
    write_json(folder / "config.json", config_json(replace(config, dtype=dtype)) | dict(config_values or {}))
    write_shards(folder, stored, shards)
    write_tokenizer(folder, config)
    return folder


def write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    """One model.safetensors, or `shards` files that take the tensors in turn, with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(names.values())):
        part = {name: value for name, value in tensors.items() if names[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(value.nbytes for value in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": names})


def write_tokenizer(folder: Path, config: ModelConfig) -> None:
    """A tokenizer of one token a printable character; begin and end are the last two ids of (at most) 97."""
    characters = [chr(32 + i) for i in range(min(95, config.vocab_size - 2))]
    vocabulary = {token: i for i, token in enumerate([*characters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    begin = [("<s>", vocabulary["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=begin)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})


def adapter_tensors(
    config: ModelConfig,
    ranks: Mapping[tuple[int, str], int],
    seed: int,
    sd: float = 0.3,
    prefix: str = "base_model.model.",
) -> Tensors:
    """lora_A [r, d_in] and lora_B [d_out, r] of each (layer, target), by PEFT's names, float32 and non-zero."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for (layer, target), rank in sorted(ranks.items()):
        d_in, d_out = config.target_shape(target)
        for half, shape in (("lora_A", (rank, d_in)), ("lora_B", (d_out, rank))):
            name = f"{prefix}{module_name(layer, target)}.{half}.weight"
            tensors[name] = (rng.standard_normal(shape) * sd).astype(np.float32)
    return tensors


def write_adapter_folder(
    path: str | Path,
    config: ModelConfig,
    rank_or_ranks: int | Mapping[tuple[int, str], int] = 8,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    sd: float = 0.3,
    *,
    dtype: str = "float32",
    tensors: Mapping[str, np.ndarray] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a PEFT adapter folder and return its path.

    `rank_or_ranks` is one rank for all `targets` in `layers` (default all), or {(layer, target): rank}, which then
    becomes a rank_pattern of anchored full names. lora_alpha is twice the (first) rank unless overridden.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(rank_or_ranks, int):
        chosen = range(config.num_layers) if layers is None else layers
        ranks = {(layer, target): rank_or_ranks for layer in chosen for target in targets}
    else:
        ranks = dict(rank_or_ranks)
    stored = dict(tensors) if tensors is not None else adapter_tensors(config, ranks, seed, sd)
    stored = {name: np.ascontiguousarray(value.astype(DTYPES[dtype])) for name, value in stored.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", adapter_json(config, ranks) | config_overrides)
    return folder


def adapter_json(config: ModelConfig, ranks: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA with these ranks."""
    rank = next(iter(ranks.values()))
    layers = sorted({layer for layer, _ in ranks})
    pattern = {f"^{module_name(*key)}": r for key, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({target for _, target in ranks}, key=TARGETS.index),
        "layers_to_transform": layers if len(layers) < config.num_layers else None,
        "rank_pattern": pattern,
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def peak_bytes() -> int:
    """Most memory that this process ever held; Linux' VmHWM, since ru_maxrss begins with the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n")
