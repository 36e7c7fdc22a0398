"""Which options of PEFT's LoraConfig change the function, and the refusal of those that are not implemented.

Every field of LoraConfig is in exactly one of three groups: read (by rules.py), idle (it steered the training, or says
where the adapter came from), or refused unless at the value that does nothing. A field in none of them, from a newer
PEFT or another tool, is refused unless it is empty: an option that nobody here knows may change the answers. All this
is decided from the config alone, before the file of weights is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slora_ref.config.fields import show
from slora_ref.errors import UnsupportedAdapter

READ = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern",
)  # fmt: skip
IDLE = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout",
    "fan_in_fan_out",  # PEFT itself sets it to false for nn.Linear, and Llama has no other projections
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
)  # fmt: skip
NOTHING: tuple[object, ...] = (None, False)
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "peft_type": ((None, "LORA"), "only LORA is served"),
    "task_type": ((None, "CAUSAL_LM"), "other tasks have other heads"),
    "bias": ((None, "none"), "the base model's biases are trained with the adapter"),
    "use_dora": (NOTHING, "DoRA rescales every row of the changed weight"),
    "lora_bias": (NOTHING, "lora_B has a bias"),
    "modules_to_save": ((None, []), "whole modules are replaced"),
    "trainable_token_indices": ((None, [], {}), "rows of the embedding are replaced"),
    "layer_replication": ((None, []), "layers are repeated"),
    "target_parameters": ((None, []), "parameters outside of linear modules are changed"),
    "alora_invocation_tokens": ((None, []), "aLoRA acts only after its invocation tokens"),
    "use_qalora": (NOTHING, "QALoRA pools its input"),
    "use_bdlora": ((None,), "BD-LoRA's factors are block-diagonal"),
    "arrow_config": ((None,), "Arrow routes tokens between adapters"),
    "kasa_config": ((None,), "KaSA truncates the base weights and adds a diagonal"),
    "monteclora_config": ((None,), "MonteCLoRA samples its weights"),
    "velora_config": ((None,), "VeLoRA is not known to leave the forward pass alone"),
    "megatron_config": ((None,), "Megatron's parallel layers are not these modules"),
}
"""Field -> (values that change nothing, why others do)."""

KEPT_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that only set the first A and B; all others also changed the base weights."""


def check_options(values: Mapping[str, Any]) -> None:
    """Raises UnsupportedAdapter with name, value and reason of the first option that cannot be served exactly."""
    for name, (harmless, reason) in REFUSED.items():
        if name in values and values[name] not in harmless:
            raise UnsupportedAdapter(f"adapter_config.json: {name} = {show(values[name])} is not supported: {reason}")
    if values.get("init_lora_weights") not in KEPT_BASE:
        raise UnsupportedAdapter(
            f"adapter_config.json: init_lora_weights = {show(values['init_lora_weights'])} is not supported: such an "
            f"initialisation changes the base weights; save it with path_initial_model_for_weight_conversion"
        )
    known = {*READ, *IDLE, *REFUSED, "init_lora_weights"}
    for name, value in values.items():
        if name not in known and value:
            raise UnsupportedAdapter(f"adapter_config.json: unknown option {show(name)} = {show(value)}; remove it")
