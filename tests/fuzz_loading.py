"""Fuzz of everything that a stranger's folder says before a weight is used: run `python tests/fuzz_loading.py 10000`.

Valid folders are broken in one file at a time: config.json, generation_config.json, adapter_config.json, an index, and
the headers of both safetensors files; values of every kind, keys lost, added and renamed, bytes cut, flipped and
repeated, sizes far too large. Each folder loads right or is refused by a SloraError of one line in under a second.
"Right" is checked against independent readers: json and PEFT's matching rule for scales, safetensors' own reader for
tensors.

Runs outside of pytest, since the shape checks there would be timed too; tests/test_fuzz_loading.py starts it and reads
the JSON object that it prints: examples, loaded, refused, slowest_s, peak_mb, grown_mb.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from safetensors import safe_open  # noqa: E402
from tiny import TARGETS, module_name, peak_bytes, tiny_config, write_adapter_folder, write_model_folder  # noqa: E402

from slora_ref.adapter import Adapter, load_adapter, read_header  # noqa: E402
from slora_ref.checkpoint import load_checkpoint  # noqa: E402
from slora_ref.config import ModelConfig  # noqa: E402
from slora_ref.errors import SloraError  # noqa: E402

CONFIG = tiny_config(num_layers=1)
SLOWEST = 1.0
BATCH = 1000  # hypothesis remembers all examples of a run, and that is memory too
LONGEST_MESSAGE = 600
EVIL = r"""
(a|a)*b (.*)*x ((((a*)*)*)*)*$ (?:.*.*.*.*.*.*.*.*)y (x+x+)+y .{9999999}q ((?:){99999}){9999} (?i)Q_PROJ (?=q)q
""".split()
WORDS = r"""
llama mistral silu gelu yarn llama3 dynamic linear default longrope LORA ADALORA CAUSAL_LM all-linear q_proj lm_head
none all pissa gaussian float16 F32 F16 BF16 F64 I8 model-00001-of-00002.safetensors ../x.safetensors /etc/passwd . ..
full_attention model.layers.0.self_attn.q_proj .*\.[qv]_proj ^model.layers.0.mlp.down_proj ( [ ) * \
""".split()
KEYS = """
rope_scaling rope_parameters rope_theta type rope_type factor original_max_position_embeddings low_freq_factor dtype
high_freq_factor attention_factor beta_fast mscale truncate sliding_window head_dim quantization_config layer_types
tie_word_embeddings attention_bias mlp_bias eos_token_id rank_pattern alpha_pattern use_rslora use_dora lora_bias
modules_to_save exclude_modules layers_to_transform layers_pattern init_lora_weights layer_replication shape
data_offsets __metadata__ weight_map nobody_knows_this
""".split()
FILES = (
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors.index.json",
    "model/model-00001-of-00002.safetensors",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
)

numbers = st.one_of(
    st.integers(-3, 200),
    st.sampled_from(
        [2**31, 2**63, 2**64, 10**30, -(10**30), 0.0, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, 0.5]
    ),
)
texts = st.one_of(st.sampled_from([*WORDS, *KEYS, *EVIL]), st.text(max_size=12), st.just("\ud800\n\x00"))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
edits = st.lists(
    st.tuples(st.sampled_from(["set", "set", "set", "lose", "rename", "nest"]), st.integers(0, 999), texts, values),
    min_size=0,
    max_size=3,
)
breaks = st.one_of(
    st.just(("keep", 0, b"")),
    st.just(("keep", 0, b"")),
    st.tuples(
        st.sampled_from(["cut", "overwrite", "insert", "append"]), st.integers(0, 1 << 20), st.binary(max_size=12)
    ),
    st.tuples(
        st.sampled_from(["brackets", "braces", "spaces", "digits", "twice", "utf16", "empty"]), st.just(0), st.just(b"")
    ),
)
lengths = st.one_of(
    st.none(), st.none(), st.none(), st.sampled_from([0, 1, 2, 2**31, 2**60, 2**64 - 1]), st.integers(0, 5000)
)


def edit(document: Any, changes: list[tuple[str, int, str, Any]]) -> Any:
    """A JSON document with some fields, at any depth, replaced, lost, renamed or wrapped."""
    for action, where, name, value in changes:
        places = [(holder, key) for holder in objects(document) for key in [*holder, name]]
        holder, key = places[where % len(places)]
        old = holder.pop(key, None)
        if action == "set":
            holder[key] = value
        elif action == "rename":
            holder[name] = old
        elif action == "nest":
            holder[key] = [old, {name: old}]
    return document


def objects(document: Any) -> list[dict[str, Any]]:
    """All objects in a JSON document."""
    if isinstance(document, dict):
        return [document] + [found for value in document.values() for found in objects(value)]
    return [found for value in document for found in objects(value)] if isinstance(document, list) else []


def damage(data: bytes, action: str, where: int, junk: bytes) -> bytes:
    """The bytes cut, overwritten, or replaced by something large or deep."""
    at = where % (len(data) + 1)
    return {
        "keep": data,
        "cut": data[:at],
        "overwrite": data[:at] + junk + data[at + len(junk) :],
        "insert": data[:at] + junk + data[at:],
        "append": data + junk,
        "brackets": b"[" * 200_000,
        "braces": b'{"a":' * 100_000,
        "spaces": data + b" " * (5 << 20),
        "digits": data.replace(b"8", b"8" * 5000, 1),
        "twice": data + data,
        "utf16": data.decode("utf-8", "replace").encode("utf-16"),
        "empty": b"",
    }[action]


def broken_json(data: bytes, changes: Any, harm: Any) -> bytes:
    """A JSON file, its fields edited, then its bytes damaged."""
    return damage(json.dumps(edit(json.loads(data), changes)).encode(), *harm)


def broken_tensors(data: bytes, changes: Any, harm: Any, length: int | None) -> bytes:
    """A safetensors file, its header edited, perhaps another length stated, then its bytes damaged.

    Half a surrogate pair is left out: safetensors refuses such a text wherever it stands.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(edit(json.loads(data[8 : 8 + size]), changes), ensure_ascii=False).encode("utf-8", "replace")
    stated = len(header) if length is None else length
    return damage(stated.to_bytes(8, "little") + header + data[8 + size :], *harm)


class Fuzz:
    """The valid folders, one example's broken file at a time, and what was seen."""

    def __init__(self, root: Path) -> None:
        write_model_folder(root / "model", CONFIG)
        write_adapter_folder(root / "adapter", CONFIG, 4, ("q_proj", "v_proj", "down_proj"))
        (root / "model/generation_config.json").write_text('{"eos_token_id": [96, 2]}')
        self.root = root
        self.valid = {name: (root / name).read_bytes() for name in FILES}
        self.loaded = self.refused = 0
        self.slowest = 0.0

    def check(self, name: str, changes: Any, harm: Any, length: int | None) -> None:
        """Break one file, load all, and judge."""
        valid = self.valid[name]
        tensors = name.endswith(".safetensors")
        data = broken_tensors(valid, changes, harm, length) if tensors else broken_json(valid, changes, harm)
        (self.root / name).write_bytes(data)
        started = time.perf_counter()
        try:
            config = ModelConfig.from_folder(self.root / "model")
            weights = load_checkpoint(self.root / "model", config)
            adapter = load_adapter(read_header(self.root / "adapter", config), config)
        except SloraError as error:
            self.refused += 1
            message = str(error)
            assert message.isprintable() and 0 < len(message) < LONGEST_MESSAGE, message
        else:
            self.loaded += 1
            check_checkpoint(self.root / "model", weights.embed)
            check_adapter(self.root / "adapter", adapter, config)
        finally:
            seconds = time.perf_counter() - started
            (self.root / name).write_bytes(valid)
        self.slowest = max(self.slowest, seconds)
        assert seconds < SLOWEST, f"{name}: {seconds} s"


def check_checkpoint(folder: Path, embed: np.ndarray) -> None:
    """The embedding is the one that safetensors reads through the index."""
    name = "model.embed_tokens.weight"
    file = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"][name]
    with safe_open(folder / file, "np") as reader:
        assert np.array_equal(reader.get_tensor(name), embed)


def check_adapter(folder: Path, adapter: Adapter, config: ModelConfig) -> None:
    """Every tensor of the file is in the adapter, with the scale that PEFT's rule gives by Python's own matcher."""
    values = json.loads((folder / "adapter_config.json").read_bytes())
    header = adapter.header
    with safe_open(folder / "adapter_model.safetensors", "np") as reader:
        names = set(reader.keys())
        assert len(names) == 2 * header.matched > 0
        for layer, target in zip(*np.nonzero(header.ranks), strict=True):
            module = module_name(int(layer), TARGETS[target])
            for half, ours in (("A", adapter.a), ("B", adapter.b)):
                stored = next(name for name in names if f"{module}.lora_{half}." in f"model.{name}".replace("..", "."))
                assert np.array_equal(reader.get_tensor(stored).astype(np.float32), ours[int(layer), int(target)])
            rank = first(values.get("rank_pattern"), module, values.get("r"), 8)
            alpha = first(values.get("alpha_pattern"), module, values.get("lora_alpha"), 8)
            assert header.ranks[layer, target] == rank
            scale = alpha / math.sqrt(rank) if values.get("use_rslora") else alpha / rank
            assert header.scales[layer, target] == np.float32(scale)


def first(table: Any, module: str, general: Any, default: float) -> Any:
    """PEFT's rule for a module: the first key that matches up to its end, else the general value."""
    for key, value in (table or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default if general is None else general


def main(examples: int) -> None:
    """Run so many examples and print what was seen."""
    warnings.simplefilter("ignore")
    start_mb = peak_bytes() / 1e6
    with tempfile.TemporaryDirectory() as root:
        fuzz = Fuzz(Path(root))
        for start in range(0, examples, BATCH):
            options = settings(max_examples=min(BATCH, examples - start), deadline=None, database=None)
            quiet = settings(options, suppress_health_check=list(HealthCheck))
            seed(start)(quiet(given(st.sampled_from(FILES), edits, breaks, lengths)(fuzz.check)))()
            gc.collect()
    peak = peak_bytes() / 1e6
    seen = {"loaded": fuzz.loaded, "refused": fuzz.refused, "slowest_s": fuzz.slowest, "peak_mb": peak}
    seen["grown_mb"] = peak - start_mb
    print(json.dumps({"examples": examples, **seen}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
