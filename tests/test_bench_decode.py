"""bench decode and what it is made of: floors, synthetic adapters, and one case on the host build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import CONFIG, model_folder, new_engine

from slora_ref import SamplingParams
from slora_ref.adapter import load_adapter, read_header
from slora_ref.bench.decode.cases import DecodeCase, DecodeOptions
from slora_ref.bench.decode.run import line, measure
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config.presets import PRESETS, parameters, preset
from slora_ref.errors import ConfigError
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.tape import Replayed
from slora_ref.reference import Reference
from slora_ref.synthetic import AdapterKind, write_adapters

ALL = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@pytest.mark.parametrize(
    ("batch", "adapters", "floor"), [(64, 0, 4.8), (64, 64, 5.1), (128, 0, 6.4), (128, 128, 6.9)]
)
def test_the_floors_are_those_that_the_peers_were_compared_with(batch: int, adapters: int, floor: float) -> None:
    case = DecodeCase(preset("llama-7b"), batch, adapters, AdapterKind(), 192)
    assert case.floor_ms(800.0) == pytest.approx(floor, abs=0.1)


def test_shards_divide_the_bytes_and_pay_for_the_sums() -> None:
    one, two = (DecodeCase(preset("llama-13b"), 64, 64, AdapterKind(), 192, shards).floors(800.0) for shards in (1, 2))
    for part in ("gemm", "lora", "attention"):
        assert two[part].bytes_ms == one[part].bytes_ms / 2 and two[part].flops_ms == one[part].flops_ms / 2
    assert one["communication"].bytes_ms == 0.0
    assert two["communication"].bytes_ms == pytest.approx(1e3 * 81 * 64 * 5120 * 2 / 4.5e11)


def test_each_model_has_the_parameters_of_its_name() -> None:
    for name, config in PRESETS.items():
        billions = float(name.removeprefix("llama-").removesuffix("b"))
        assert parameters(config) / 1e9 == pytest.approx(billions, rel=0.1)
    with pytest.raises(ConfigError, match="llama-7b, llama-13b"):
        preset("llama-8b")


def test_cases_are_all_batches_with_all_adapters_that_fit() -> None:
    cases = DecodeOptions(batches=(4, 8), adapters=(0, 4, 8), prompt=10, output=6).cases()
    assert [(case.batch, case.adapters, case.context) for case in cases] == [
        (4, 0, 13),
        (4, 4, 13),
        (8, 0, 13),
        (8, 4, 13),
        (8, 8, 13),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"batches": ()}, {"batches": (0,)}, {"adapters": (-1,)}, {"output": 1}),
        *({"model": "gpt"}, {"shards": 3}, {"overlap_lora": True}, {"modes": ()}, {"modes": ("fast",)}),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DecodeOptions(**wrong)


def test_kinds_of_adapters_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks"):
        AdapterKind((0,))
    with pytest.raises(ConfigError, match="q_proj"):
        AdapterKind((8,), ("qproj",))


def test_synthetic_adapters_are_what_they_say_and_change_the_answers(tmp_path: Path) -> None:
    kind = AdapterKind((5, 2), ALL)
    paths = write_adapters(tmp_path, CONFIG, kind, 3, seed=1)
    sizes = [(path / "adapter_model.safetensors").stat().st_size for path in paths]
    assert sum(sizes) == pytest.approx(kind.folder_bytes(CONFIG, 3), rel=0.5)
    weights = load_checkpoint(model_folder(), CONFIG, "float32")
    ids, logits = list(range(3, 20)), []
    for path, rank in zip(paths, (5, 2, 5), strict=True):
        header = read_header(path, CONFIG)
        assert (header.ranks == rank).all() and np.allclose(header.scales, 16 / rank)
        logits.append(Reference(CONFIG, weights, load_adapter(header, CONFIG)).logits(ids))
    logits.append(Reference(CONFIG, weights).logits(ids))
    for i, first in enumerate(logits):
        assert all(np.abs(first - second).max() > 0.5 for second in logits[:i])


def test_a_disk_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GB on disk"):
        write_adapters(tmp_path, preset("llama-30b"), AdapterKind((1 << 14,)), 4000, seed=0)
    assert not list(tmp_path.iterdir())


class Counted(Replayed):
    """Counts the graphs that are timed, in the place of milliseconds."""

    parts: list[set[str]] = []  # noqa: RUF012

    def milliseconds(self) -> float:
        super().milliseconds()
        self.parts.append({part for part, _ in self.tape.work})
        return float(len(self.parts))


def test_a_case_is_served_and_its_parts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOps, "graph", lambda _, tape: Counted(tape))
    engine = new_engine(on="host", poison=False)
    for name, path in enumerate(write_adapters(tmp_path, CONFIG, AdapterKind(), 2, seed=0)):
        engine.add_adapter(str(name), path)
    options = replace(DecodeOptions(), batches=(3,), prompt=6, output=6)
    row = measure(engine, DecodeCase(CONFIG, 3, 2, AdapterKind(), 9), options, 1.0)
    assert Counted.parts == [{"gemm"}, {"lora"}, {"attention"}, {"gemm", "lora", "attention", "rest"}]
    assert (row["gemm_ms"], row["lora_ms"], row["attention_ms"], row["kernels_ms"]) == (1, 2, 3, 4)
    assert row["step_ms"] == pytest.approx(6 + row["rest_ms"])
    promised = """model dtype batch adapters rank context shards mode step_ms floor_ms gemm_ms lora_ms attention_ms
    communication_ms rest_ms part_floors""".split()
    assert row.keys() >= set(promised)
    assert row["part_floors"].keys() == {"gemm", "lora", "attention", "communication"}
    assert "3" in line(row)
    assert not engine.has_work
    with pytest.raises(ConfigError, match="all 9 requests decoded together in 0 steps, fewer than half"):
        measure(engine, DecodeCase(CONFIG, 9, 2, AdapterKind(), 9), options, 1.0)  # the engine runs 8
    engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    engine.check()
