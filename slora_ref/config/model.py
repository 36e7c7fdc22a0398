"""ModelConfig: the shape and the constants of a Llama model, from a Hugging Face config.json.

Read here: what changes the logits or the end of a text. Everything that would change them and is not implemented is
refused by name; training-time fields are not looked at. It deliberately does not know what the weights files hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slora_ref.config.fields import Fields, read_json, show
from slora_ref.config.rope import RopeConfig, parse_rope
from slora_ref.errors import CheckpointError, CheckpointWarning, UnsupportedModel

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven projections that an adapter may change; the index in this tuple is the target's number everywhere."""

DTYPES = ("float32", "float16", "bfloat16")
MODEL_TYPES = ("llama", "mistral")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "LlamaModel", "MistralModel")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "per_layer_config": ({},),
    "quantization_config": ({},),
    "auto_map": ({},),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Fields that change the logits, with the values (beside null) at which they do not."""

GREEDY_RULES: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "exponential_decay_length_penalty": (),
    "num_beams": (1,),
    "guidance_scale": (1,),
}
"""Fields of generation_config.json that change greedy answers, with the values (beside null) at which they do not."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The constants of one Llama model. Sizes count elements; `head_dim` need not be hidden_size / num_heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raises UnsupportedModel when the heads cannot be grouped or rotated."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even")

    @property
    def q_width(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.head_dim

    def target_shape(self, target: str) -> tuple[int, int]:
        """(d_in, d_out) of one of TARGETS: its weight is [d_out, d_in] and y = x W.T."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.q_width),
            "k_proj": (hidden, self.kv_width),
            "v_proj": (hidden, self.kv_width),
            "o_proj": (self.q_width, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }[target]

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """The config of a checkpoint folder; generation_config.json, where present, names begin and end tokens.

        How tokens are chosen is each request's to say (SamplingParams): what generation_config.json says of it has no
        effect, and a CheckpointWarning where even greedy answers would differ.

        Raises CheckpointError when a file is missing or not JSON, UnsupportedModel as `from_dict`, and for a folder
        that holds an adapter too: transformers would load both as one model.
        """
        folder = Path(path)
        values = read_json(folder / "config.json", CheckpointError)
        if (folder / "adapter_config.json").exists():
            raise UnsupportedModel(
                f"{show(str(folder))} holds a model and an adapter, which transformers loads as one: move "
                "adapter_config.json and the adapter's weights to a folder of their own and register that"
            )
        if (folder / "generation_config.json").exists():
            generation = read_json(folder / "generation_config.json", CheckpointError)
            _warn_of_rules(generation)
            for name in ("bos_token_id", "eos_token_id"):
                if generation.get(name) not in (None, []):
                    values[name] = generation[name]
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config in the form of config.json; absent fields have transformers' defaults.

        Raises UnsupportedModel with the field's name for a missing size, a wrong type or a feature not implemented.
        """
        fields = Fields(values, "config.json", UnsupportedModel)
        _check_supported(fields)
        mistral = _model_type(fields) == "mistral"
        heads = fields.integer("num_attention_heads", 1, 1 << 16)
        hidden = fields.integer("hidden_size", 1, 1 << 20)
        positions = fields.integer("max_position_embeddings", 1, 1 << 31, 131072 if mistral else 2048)
        _check_window(fields, mistral, positions)
        bos = fields.token_ids("bos_token_id") if "bos_token_id" in values else (1,)
        return cls(
            vocab_size=fields.integer("vocab_size", 1, 1 << 26),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
            num_layers=fields.integer("num_hidden_layers", 1, 1024),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", 1, 1 << 16, _default_kv_heads(values, mistral, heads)),
            head_dim=_head_dim(fields, hidden, heads),
            rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
            rope=parse_rope(values, positions),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            max_position_embeddings=positions,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=fields.token_ids("eos_token_id") if "eos_token_id" in values else (2,),
            dtype=_dtype(fields),
        )


def _acting(values: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The fields of a table such as NEUTRAL that are neither null nor at a neutral value."""
    return [name for name, idle in neutral.items() if values.get(name) is not None and values[name] not in idle]


def _warn_of_rules(generation: Mapping[str, Any]) -> None:
    """Warns of rules in generation_config.json by which transformers' greedy answer would be another."""
    acting = _acting(generation, GREEDY_RULES)
    if acting:
        shown = ", ".join(f"{name} = {show(generation[name])}" for name in acting)
        warnings.warn(f"generation_config.json: {shown} has no effect here", CheckpointWarning, stacklevel=3)


def _model_type(fields: Fields) -> str:
    """llama or mistral, from model_type or else from the architecture's name."""
    architectures = fields.values.get("architectures") or ["LlamaForCausalLM"]
    if not isinstance(architectures, list) or not all(name in ARCHITECTURES for name in architectures):
        raise fields.refuse("architectures", f"supported: {', '.join(ARCHITECTURES)}")
    guess = "mistral" if str(architectures[0]).startswith("Mistral") else "llama"
    kind = fields.text("model_type", guess if "architectures" in fields.values else "")
    if kind not in MODEL_TYPES:
        raise fields.refuse("model_type", f"supported: {', '.join(MODEL_TYPES)}")
    return kind


def _check_supported(fields: Fields) -> None:
    """Refuse each field of NEUTRAL that is not at a neutral value, and layers of another kind."""
    for name in _acting(fields.values, NEUTRAL):
        raise fields.refuse(name, "this changes the model and is not supported")
    layers = fields.values.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(kind == "full_attention" for kind in layers)):
        raise fields.refuse("layer_types", "only full_attention is supported")
    if fields.values.get("model_type") == "mistral" and (fields.flag("attention_bias") or fields.flag("mlp_bias")):
        raise fields.refuse("attention_bias", "transformers gives a mistral no biases; model_type llama has them")


def _check_window(fields: Fields, mistral: bool, positions: int) -> None:
    """Refuse a sliding window shorter than the longest sequence. A mistral without the field has one of 4096."""
    default = 4096 if mistral and "sliding_window" not in fields.values else positions
    window = fields.integer("sliding_window", 1, 1 << 40, default)
    if window < positions:
        raise UnsupportedModel(
            f"sliding_window {window} takes effect within max_position_embeddings {positions} and is not supported; "
            f"set sliding_window to null, or max_position_embeddings to {window}, if that is what you want"
        )


def _default_kv_heads(values: Mapping[str, Any], mistral: bool, heads: int) -> int:
    """KV heads when not given: as many as query heads; a mistral without the field at all has 8."""
    return 8 if mistral and "num_key_value_heads" not in values else heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """head_dim as given, else hidden / heads, which must then be whole."""
    if fields.values.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(f"hidden_size {hidden} is not a multiple of {heads} heads and head_dim is not given")
    return fields.integer("head_dim", 1, 1 << 16, hidden // heads)


def _dtype(fields: Fields) -> str:
    """The storage type that the folder claims; the tensors themselves are the truth. Old spelling: torch_dtype."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"config.json: dtype {show(name)} is not supported; supported: {', '.join(DTYPES)}")
    return name
