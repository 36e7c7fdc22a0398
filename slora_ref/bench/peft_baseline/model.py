"""A Llama with random weights and many LoRA adapters, as transformers and PEFT make them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, LlamaConfig

from slora_ref.bench.peft_baseline.process import PeftModelSpec
from slora_ref.config import ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.synthetic import ALPHA, AdapterKind


def random_model(spec: PeftModelSpec) -> Any:
    """A PeftModel with adapters "0", "1", ...; base, A and B have random weights of one dtype.

    Raises:
        ConfigError: there is no GPU for PyTorch.
    """
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no GPU: install its build for CUDA")
    torch.manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    with torch.device(spec.device):
        base = AutoModelForCausalLM.from_config(_llama(spec.config), dtype=dtype)
        model = get_peft_model(base, _lora(spec.kind, 0), adapter_name="0")
        made = min(spec.adapters, len(spec.kind.ranks))
        for number in range(1, made):
            model.add_adapter(str(number), _lora(spec.kind, number))
    model.to(spec.device)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)  # PEFT makes them float32, for training
    for number in range(made, spec.adapters):
        _add_like(model, str(number), str(number % made))
    return model.requires_grad_(False).eval()


def _add_like(model: Any, name: str, like: str) -> None:
    """Adds an adapter of the shapes of `like`, with random weights of its own.

    add_adapter would go through all modules once more for each; for 128 adapters that takes minutes.
    """
    model.peft_config[name] = model.peft_config[like]
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            tables = [*vars(layer).values(), *layer.children()]  # r, scaling, lora_A, ...: by adapter
            for table in tables:
                if isinstance(table, dict | torch.nn.ModuleDict) and like in table:
                    table[name] = copy.deepcopy(table[like])
            layer.lora_A[name].reset_parameters()
            layer.lora_B[name].reset_parameters()


def _llama(config: ModelConfig) -> Any:
    """transformers' config of this shape, without a token that would end an answer."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )


def _lora(kind: AdapterKind, number: int) -> Any:
    rank = kind.ranks[number % len(kind.ranks)]
    return LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=list(kind.targets), init_lora_weights=False)
