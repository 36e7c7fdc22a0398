"""What adapter_config.json says about each module: is it changed, with which rank and which scale.

PEFT's own rules. A key of rank_pattern or alpha_pattern is a regular expression that must match the module's name
from some dot to the end; the first key in the file's order wins; no match means the global value. So "q_proj" is every
q, and "1.self_attn.q_proj" is layer 1's but not layer 11's. The names begin with "model." if the adapter was trained on
a model with a head, and with "layers." if on one without. The scale is worked out here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from slora_ref.adapter.patterns import Names
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.config.fields import Fields, show
from slora_ref.errors import AdapterError, UnsupportedAdapter

OUTSIDE = ("lm_head", "model.embed_tokens")
MAX_RANK = 1 << 16
MAX_KEYS = 4096  # of a list or a table; a model of 126 layers has 882 modules
LARGEST = 1e9
SET_LIKE = re.compile(r"""[\[{(]['"\w., ]+[\])}]""", re.ASCII)
Value = TypeVar("Value")


def module_name(layer: int, target: int) -> str:
    """A projection's full name as transformers and PEFT write it; `target` is its index in TARGETS."""
    return f"model.layers.{layer}.{'self_attn' if target < 4 else 'mlp'}.{TARGETS[target]}"


class Rules:
    """adapter_config.json, ready to be asked about modules. Its options must have passed check_options.

    `selected`: the modules that target_modules names, None when it is null. `ranks`, `alphas`: values by module where
    a pattern gives one; `rank` and `alpha` elsewhere. `notes`: what has no effect. Modules are named as module_name
    does, whatever `root`.
    """

    def __init__(self, values: Mapping[str, Any], config: ModelConfig, root: str = "model.") -> None:
        """Reads the config.

        Args:
            root: what the names of modules began with where the adapter was trained: "model." or nothing.

        Raises:
            AdapterError for a wrong type, UnsupportedAdapter for LoRA on the head or the embedding.
        """
        self.fields = Fields(values, "adapter_config.json", AdapterError)
        pairs = [(layer, target) for layer in range(config.num_layers) for target in range(len(TARGETS))]
        self.modules = {module_name(*pair): pair for pair in pairs}
        self._spelled = {root + name.removeprefix("model."): name for name in (*self.modules, *OUTSIDE)}
        self.notes: list[str] = []
        self._names: Names | None = None
        self.rslora = self.fields.flag("use_rslora")
        self.rank = self.fields.integer("r", 1, MAX_RANK, 8)
        self.alpha = self.fields.number("lora_alpha", -LARGEST, LARGEST, 8)
        ranks, alphas = self._table("rank_pattern"), self._table("alpha_pattern")
        self.ranks = self._by_module(ranks, {key: ranks.integer(key, 1, MAX_RANK) for key in ranks.values})
        self.alphas = self._by_module(alphas, {key: alphas.number(key, -LARGEST, LARGEST) for key in alphas.values})
        self.selected = self._selected()

    def rank_of(self, module: str) -> int:
        """The rank that the config gives a module."""
        return self.ranks.get(module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on x A B: alpha / r, or with rank-stabilised LoRA alpha / sqrt(r)."""
        alpha, rank = self.alphas.get(module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def _table(self, name: str) -> Fields:
        """rank_pattern or alpha_pattern; null is an empty one."""
        value = self.fields.values.get(name) or {}
        if not isinstance(value, dict) or len(value) > MAX_KEYS:
            raise self.fields.refuse(name, f"an object of at most {MAX_KEYS} keys is needed")
        return Fields(value, f"adapter_config.json: {name}", AdapterError)

    def _by_module(self, table: Fields, values: Mapping[str, Value]) -> dict[str, Value]:
        """Value of each module that some key matches, by the first such key; notes keys that match nothing."""
        found: dict[str, Value] = {}
        idle = []
        for key, value in values.items():
            matched = self._matching(rf"(.*\.)?({key})$")
            found = dict.fromkeys(matched, value) | found
            if not matched:
                idle.append(key)
        if idle:
            self.notes.append(f"{table.source}: {len(idle)} keys match no module: {show(idle)}")
        return found

    def _matching(self, pattern: str) -> set[str]:
        """The names, of modules or of what lies outside, that a regular expression matches whole."""
        if self._names is None:
            self._names = Names(list(self._spelled))
        return {self._spelled[name] for name in self._names.fullmatch(pattern)}

    def _selected(self) -> set[str] | None:
        """The modules that target_modules names, less exclusions; None when the config leaves it open."""
        value = self.fields.values.get("target_modules")
        if value is None:
            return None
        selected = self._targets(value) - self._excluded()
        outside = [name for name in OUTSIDE if name in selected]
        if outside:
            raise UnsupportedAdapter(
                f"target_modules includes {outside[0]}: LoRA on head or embedding is not supported"
            )
        return selected

    def _targets(self, value: object) -> set[str]:
        """target_modules as a list of name endings, the text of a set, all-linear, or a regular expression."""
        if isinstance(value, str) and self.fields.values.get("layers_to_transform") is not None:
            raise self.fields.refuse("layers_to_transform", "PEFT allows it only beside a list of target_modules")
        if isinstance(value, str) and value.lower() == "all-linear":
            return set(self.modules)
        if isinstance(value, str) and not SET_LIKE.fullmatch(value):
            return self._matching(value)
        endings = self._texts("target_modules", re.findall(r"[\w.]+", value) if isinstance(value, str) else value)
        whole = {self._spelled[name] for name in endings & self._spelled.keys()}
        return {name for name in self._ending(endings) if name in whole or self._in_layers(name)}

    def _excluded(self) -> set[str]:
        """exclude_modules: a list of name endings or a regular expression."""
        value = self.fields.values.get("exclude_modules") or []
        return self._matching(value) if isinstance(value, str) else self._ending(self._texts("exclude_modules", value))

    def _texts(self, name: str, value: object) -> set[str]:
        """A list of texts as a set."""
        if not isinstance(value, list) or len(value) > MAX_KEYS or not all(isinstance(item, str) for item in value):
            raise self.fields.refuse(name, f"a list of at most {MAX_KEYS} names, a pattern or null is needed")
        return set(value)

    def _ending(self, endings: set[str]) -> set[str]:
        """The names that are one of `endings` or end, after a dot, with one."""
        dotted = tuple(f".{ending}" for ending in endings)
        return {name for spelled, name in self._spelled.items() if spelled.endswith(dotted) or spelled in endings}

    def _in_layers(self, name: str) -> bool:
        """Whether layers_to_transform (one index or a list; null and [] mean all) allows the module."""
        layers, patterns = self.fields.values.get("layers_to_transform"), self.fields.values.get("layers_pattern")
        if layers in (None, []) or name in OUTSIDE:
            return True
        if patterns and "layers" not in ([patterns] if isinstance(patterns, str) else patterns):
            raise self.fields.refuse("layers_pattern", 'a Llama has only "layers"')
        wanted = layers if isinstance(layers, list) else [layers]
        return self.modules[name][0] in wanted
