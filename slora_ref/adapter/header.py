"""AdapterHeader: everything about an adapter that can be known without reading its weights.

Registering an adapter reads its config and the header of its safetensors file, about a millisecond, and checks all of
it: thousands are registered at start-up, and a fault must show there, not in the step that first needs the adapter. The
tensors in the file are the truth about what is changed; a config that contradicts them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slora_ref.adapter.options import check_options
from slora_ref.adapter.rules import Rules, module_name
from slora_ref.checkpoint.fingerprint import Fingerprint
from slora_ref.checkpoint.tensors import FLOAT_TYPES, StoredTensor, parse_header, read_header_text
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.config.fields import parse_json, read_text, show
from slora_ref.errors import AdapterError, UnsupportedAdapter
from slora_ref.shapes import Array, Float32, Int32

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<root>(?:model\.)?)layers\.(0|[1-9][0-9]{0,4})\.(self_attn|mlp)\.([a-z]+_proj)"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
REASONS = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("lora_embedding_", "LoRA on an embedding"),
    ("modules_to_save", "a module saved whole"),
    ("trainable_tokens", "trained rows of an embedding"),
    (".bias", "a bias"),
    ("lm_head", "the output head"),
    ("embed_tokens", "the embedding"),
)
DEFAULT_TARGETS = {TARGETS.index("q_proj"), TARGETS.index("v_proj")}  # PEFT's for a llama and a mistral
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Module = tuple[int, int]
"""(layer, index of the target in TARGETS)."""
Places = Mapping[Module, Mapping[str, StoredTensor]]
"""For each module the places of its halves "A" and "B" in the file."""
MOST_KNOWN = 256
"""Distinct adapter layouts that a HeaderReader remembers; 10 MB at 32 layers."""


@dataclass(frozen=True, eq=False)
class AdapterHeader:
    """A checked adapter folder.

    Args:
        path: the folder.
        ranks: [layers, targets] rank, 0 where the adapter changes nothing.
        scales: [layers, targets] the factor on x A B, 0 where the rank is 0.
        matched: modules that the file changes; never 0.
        total: modules that target_modules names (those not in the file are changed by exactly 0).
        dtype: float32, float16, bfloat16, or mixed.
        fingerprint: of the weights file when the header was read.
        warnings: what in the config has no effect.
    """

    path: Path
    ranks: Int32[Array, "layers targets"]
    scales: Float32[Array, "layers targets"]
    matched: int
    total: int
    dtype: str
    fingerprint: Fingerprint
    warnings: tuple[str, ...] = ()


def read_header(folder: str | Path, config: ModelConfig) -> AdapterHeader:
    """Check the adapter in `folder` against the base model, without reading weights.

    Raises UnsupportedAdapter for a feature that is not served, AdapterError for damage, wrong shapes, missing halves,
    contradictions between config and file, or when nothing matches.
    """
    return HeaderReader(config).inspect(Path(folder))[0]


class HeaderReader:
    """Reads the headers of many adapters of one base model.

    Those of one training pipeline have the same config and the same header, to the byte: what these texts say is worked
    out once, and each further folder costs two small reads and a comparison, a tenth of a millisecond.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._served: set[bytes] = set()  # texts of adapter_config.json without an option that is refused
        self._known: dict[tuple[bytes, bytes, int], Meaning] = {}

    def inspect(self, folder: Path) -> tuple[AdapterHeader, Places]:
        """The header, and where its tensors lie in the file. Raises as read_header."""
        options = read_text(folder / CONFIG, AdapterError)
        if options not in self._served:  # before the weights are opened
            check_options(parse_json(folder / CONFIG, options, AdapterError))
        if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
            raise UnsupportedAdapter(
                f"{PICKLE} is a pickle, which could run code, and is not read; save as safetensors"
            )
        text, fingerprint = read_header_text(folder / WEIGHTS, AdapterError)
        texts = options, text, fingerprint.size
        if texts not in self._known:
            meaning = understand(folder, *texts, self._config)
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
                self._served.clear()
            self._known[texts] = meaning
            self._served.add(options)
        known = self._known[texts]
        header = AdapterHeader(folder, *known[:5], fingerprint, known.notes)
        return header, known.places


class Meaning(NamedTuple):
    """What the texts of an adapter say, wherever they stand; the fields are AdapterHeader's."""

    ranks: Int32[Array, "layers targets"]
    scales: Float32[Array, "layers targets"]
    matched: int
    total: int
    dtype: str
    notes: tuple[str, ...]
    places: Places


def understand(folder: Path, options: bytes, text: bytes, size: int, config: ModelConfig) -> Meaning:
    """Works out and checks what an adapter is.

    Args:
        folder: for messages.
        options: the text of adapter_config.json, whose options are served.
        text: the header of the weights, a file of `size` bytes.
    """
    values = parse_json(folder / CONFIG, options, AdapterError)
    halves, root = pair_halves(parse_header(folder / WEIGHTS, text, size, AdapterError))
    rules = Rules(values, config, root)
    for module in halves:
        check_module(module, halves[module], rules, config)
    total = len(halves) if rules.selected is None else len(rules.selected)
    if rules.selected is None and not {target for _, target in halves} <= DEFAULT_TARGETS:
        rules.notes.append("target_modules is null: all of the file is served; PEFT would take q_proj and v_proj alone")
    if len(halves) < total:
        rules.notes.append(
            f"{len(halves)} of the {total} modules of target_modules are in the file; 0 is added to others"
        )
    types = {tensor.dtype for pair in halves.values() for tensor in pair.values()}
    dtype = NAMES[types.pop()] if len(types) == 1 else "mixed"
    return Meaning(*tables(halves, rules, config), len(halves), total, dtype, tuple(rules.notes), halves)


def pair_halves(tensors: Mapping[str, StoredTensor]) -> tuple[dict[Module, dict[str, StoredTensor]], str]:
    """For each module its tensors by half, "A" and "B", and the root of the names, "model." or nothing.

    Raises for a name that is no half, a half given twice, or names of both roots.
    """
    halves: dict[Module, dict[str, StoredTensor]] = {}
    roots = set()
    for name, tensor in tensors.items():
        found = KEY.fullmatch(name)
        if found is None or found[4] not in TARGETS or (found[3] == "self_attn") != (found[4] in TARGETS[:4]):
            raise unknown_tensor(name)
        pair = halves.setdefault((int(found[2]), TARGETS.index(found[4])), {})
        if found[5] in pair:
            raise AdapterError(f"tensor {show(name)} is in the file under a second name too")
        pair[found[5]] = tensor
        roots.add(found["root"])
    if not halves:
        raise AdapterError(f"{WEIGHTS} holds no tensors: nothing would be changed")
    if len(roots) > 1:
        raise AdapterError(f"{WEIGHTS} names some modules model.layers... and some layers...: name all in one way")
    return halves, roots.pop()


def unknown_tensor(name: str) -> Exception:
    """The refusal of a tensor that is not half of a LoRA on one of the seven targets."""
    reason = next((reason for part, reason in REASONS if part in name), "not a LoRA matrix of one of the seven targets")
    return UnsupportedAdapter(f"tensor {show(name)} is not supported: {reason}")


def check_module(module: Module, pair: Mapping[str, StoredTensor], rules: Rules, config: ModelConfig) -> None:
    """Raises AdapterError, with the module's name, unless both halves are there and fit the model and the config."""
    layer, target = module
    name = module_name(layer, target)
    if layer >= config.num_layers:
        raise AdapterError(f"module {name}: the base model has {config.num_layers} layers")
    if len(pair) != 2:
        there = next(iter(pair))
        raise AdapterError(f"module {name}: lora_{there} is in the file, lora_{'AB'.replace(there, '')} is not")
    d_in, d_out = config.target_shape(TARGETS[target])
    rank = rules.rank_of(name)
    if pair["A"].shape != (rank, d_in) or pair["B"].shape != (d_out, rank):
        raise AdapterError(
            f"module {name}: lora_A is {show(list(pair['A'].shape))} and lora_B is {show(list(pair['B'].shape))}; "
            f"base model and config (r = {rank}) ask for [{rank}, {d_in}] and [{d_out}, {rank}]"
        )
    for tensor in pair.values():
        if tensor.dtype not in FLOAT_TYPES:
            raise UnsupportedAdapter(f"module {name} is stored as {tensor.dtype}; supported: {', '.join(FLOAT_TYPES)}")
    if rules.selected is not None and name not in rules.selected:
        raise AdapterError(f"module {name} is in the file, but target_modules of {CONFIG} leaves it out")


def tables(
    modules: Mapping[Module, object], rules: Rules, config: ModelConfig
) -> tuple[Int32[Array, "layers targets"], Float32[Array, "layers targets"]]:
    """Rank and scale of each module as read-only tables, 0 where there is none."""
    ranks = np.zeros((config.num_layers, len(TARGETS)), np.int32)
    scales = np.zeros(ranks.shape, np.float32)
    for module in modules:
        name = module_name(*module)
        ranks[module], scales[module] = rules.rank_of(name), rules.scale_of(name)
    ranks.flags.writeable = scales.flags.writeable = False
    return ranks, scales
