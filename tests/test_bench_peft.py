"""PEFT in `bench decode` and `bench serve`: refused where it is missing; what its process says, or that it failed."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from dataclasses import replace
from typing import Any

import pytest
from serving import CONFIG

from slora_ref.bench.decode.cases import DecodeOptions
from slora_ref.bench.decode.peft_rows import peft_rows
from slora_ref.bench.peft_baseline.process import PACKAGES, BaselineFailed, PeftModelSpec, StepTask, measure_peft
from slora_ref.bench.serve import ServeOptions, bench_serve
from slora_ref.bench.serve.traffic import draw_traffic
from slora_ref.cli.main import main
from slora_ref.config.presets import PRESETS
from slora_ref.errors import ConfigError, how_to_install
from slora_ref.synthetic import AdapterKind

SPEC = PeftModelSpec(config=CONFIG, kind=AdapterKind((4, 2)), adapters=5, device="cpu", dtype="float32")
SMALL = ServeOptions(registered=(2, 30, 2), requests=24, distinct=3, lengths=(4, 12), rate=200.0)
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_peft = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def quiet(_: str) -> None:
    """Says nothing."""


def only(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """Of PEFT's packages these are there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)


@pytest.mark.parametrize("argv", [["bench", "decode", "--peft"], ["bench", "serve", "--peft"]], ids=" ".join)
def test_without_the_packages_it_is_refused_with_the_remedy(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "torch")
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert "needs transformers, peft:" in message and how_to_install("oracle") in message


def test_what_it_cannot_measure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "torch", "transformers", "peft")
    assert ServeOptions(peft=1.0).peft == 1.0 and DecodeOptions(peft=True).peft
    for options in (lambda: ServeOptions(peft=1.0, shards=2), lambda: DecodeOptions(peft=True, shards=2)):
        with pytest.raises(ConfigError, match="shards is 2"):
            options()
    with pytest.raises(ConfigError, match="peft is 0"):
        ServeOptions(peft=0.0)


class Fatal:
    """Ends the process that unpickles it, as the system does when memory is short."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, dtype="float99"), "float99|No module named"),  # the error of PyTorch, or that it is missing
        (replace(SPEC, config=Fatal()), "exit code 3"),
    ],
    ids=["error", "death"],
)
def test_a_failure_of_the_process_is_named_and_the_process_is_gone(spec: PeftModelSpec, message: str) -> None:
    with pytest.raises(BaselineFailed, match=message):
        list(measure_peft(spec, [StepTask(1, 1, 8)]))
    assert not multiprocessing.active_children()


@pytest.mark.oracle
@needs_peft
def test_rows_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "llama-7b", CONFIG)
    options = DecodeOptions(
        batches=(2, 4), adapters=(0, 1, 4), prompt=30, output=20, dtype="float32", kind=SPEC.kind, peft=True
    )
    rows = peft_rows(quiet, options, "cpu")
    assert [(row["batch"], row["adapters"]) for row in rows] == [(2, 0), (2, 1), (4, 0), (4, 1), (4, 4)]
    for row, case in zip(rows, options.cases(), strict=True):
        assert row.keys() >= options.describe(case).keys() and row["system"] == "peft"
        assert row["step_ms"] > 0 and row["floor_ms"] == case.floor_ms(1.0)
        assert row["versions"].keys() == {"torch", "transformers", "peft"}


@pytest.mark.oracle
@needs_peft
def test_rows_of_serve() -> None:
    rows = bench_serve(quiet, replace(SMALL, peft=60.0))
    assert [(row["system"], row["registered"]) for row in rows] == [
        *(("slora_ref", registered) for registered in (2, 30, 2)),
        *(("peft", registered) for registered in (2, 30)),
    ]
    for row in rows[3:]:
        arrivals = draw_traffic(SMALL, row["registered"])
        assert row["requests"] == row["requests_of_trace"] == 24
        assert row["adapters"] == len({one.adapter for one in arrivals}) <= row["batches"] <= 24
        assert row["requests_per_s"] * row["seconds"] == pytest.approx(24)
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(sum(one.output for one in arrivals))
        assert row["computed_tokens_per_s"] >= row["output_tokens_per_s"]
        assert 0 < row["first_token_p50_s"] < row["first_token_p99_s"] < row["seconds"]
    assert rows[4]["batches"] > rows[3]["batches"], "more adapters, smaller batches"


@pytest.mark.oracle
@needs_peft
def test_the_time_limit_leaves_the_rest_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "bench serve --registered 300 --requests 300 --distinct 3 --lengths 4,9 --peft 0.3 --json".split()
    assert main(argv) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][-1]
    assert 0 < row["requests"] < row["requests_of_trace"] == 300
    assert row["seconds"] > 0.3
    with pytest.raises(BaselineFailed, match="more seconds"):
        bench_serve(quiet, replace(SMALL, rate=0.001, peft=0.01))


@pytest.mark.oracle
@needs_peft
@pytest.mark.filterwarnings("ignore")
def test_every_adapter_is_another_and_a_mixed_batch_uses_each() -> None:
    """Three of the five are not made by PEFT itself, but must be used by it as the others are."""
    import torch

    from slora_ref.bench.peft_baseline.measure import STEPS, TokenClock
    from slora_ref.bench.peft_baseline.model import random_model

    model = random_model(SPEC)
    ids = torch.arange(1, 9).repeat(5, 1)
    with torch.inference_mode():
        mixed = model(input_ids=ids, adapter_names=list("01234")).logits[:, -1]
        alone = []
        for name in "01234":
            model.set_adapter(name)
            alone.append(model(input_ids=ids[:1]).logits[0, -1])
        with model.disable_adapter():
            base = model(input_ids=ids[:1]).logits[0, -1]
        clock = TokenClock()
        model.generate(input_ids=ids, max_new_tokens=1 + STEPS, do_sample=False, pad_token_id=0, streamer=clock)
    assert torch.allclose(mixed, torch.stack(alone), atol=1e-4)
    logits = [*alone, base]
    assert all((one - other).abs().max() > 1e-2 for i, one in enumerate(logits) for other in logits[:i])
    ranks = {name: weight.shape[0] for name, weight in model.named_parameters() if "q_proj.lora_A" in name}
    assert {rank for name, rank in ranks.items() if ".3." in name} == {2}
    assert {rank for name, rank in ranks.items() if ".4." in name} == {4}
    assert len(clock.times) == 2 + STEPS  # the prompt, then every token
