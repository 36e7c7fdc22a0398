"""The demo at scale, small: a tiny model by the kernels' host build, and what is refused before anything is made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving import CONFIG, host_kernels, model_folder, without_shape_checks
from test_shards import mpirun, needs_mpi

from slora_ref import Engine
from slora_ref.checkpoint import load_checkpoint
from slora_ref.cli.main import main
from slora_ref.demo.scale import ScaleOptions, ScaleReport, run_scale_demo
from slora_ref.demo.scale.start import StartClock, process_seconds
from slora_ref.engine.build import Note, assemble, quiet
from slora_ref.engine.devices import KernelDevice
from slora_ref.engine.follower import Follower
from slora_ref.errors import ConfigError
from slora_ref.ops.host_ops import HostOps
from slora_ref.synthetic import AdapterKind

SMALL = ScaleOptions(
    model=str(model_folder()),
    adapters=30,
    distinct=3,
    kind=AdapterKind((3, 2)),
    requests=8,
    dtype="float32",
    pool_pages=400,
    checked=3,
    lengths=(2, 7),
    device="cpu",
)


def on_host(options: ScaleOptions, note: Note = quiet) -> Engine:
    """The engine of the options on the host build of the kernels."""
    config = replace(options.engine_config(), max_batched_tokens=32, max_running=6, max_adapters=8)
    device = KernelDevice(config, HostOps(np.float32, kernels=host_kernels()))
    weights = load_checkpoint(model_folder(), CONFIG, "float32")
    return Engine(*assemble(CONFIG, weights, None, device, config, note=note))


@pytest.fixture(scope="module")
def report() -> ScaleReport:
    with without_shape_checks():
        return run_scale_demo(SMALL, lambda _: None, open_with=on_host)


def test_every_request_finishes_and_the_sample_is_right(report: ScaleReport) -> None:
    assert not report.failed, report.failed
    assert report.finished == report.requests == 8
    assert report.correct == report.checked == 3 and report.wrong == 0
    assert report.adapters_registered == 30 and report.adapters_distinct == 3
    assert report.adapter_loads >= report.adapters_used > 1


def test_the_adapters_decide_what_is_said(report: ScaleReport) -> None:
    assert report.checked_tokens >= report.decided_tokens > 0
    assert report.adapter_tokens > 0


def test_the_table_and_the_json_say_what_happened(report: ScaleReport) -> None:
    text, fields = report.table(), report.as_json()
    assert "3 right of 3" in text and "FAILED" not in text
    promised = """model device adapters_registered adapters_used requests correct wrong task_correct tokens seconds
    tokens_per_s requests_per_s first_token_p50_s first_token_p99_s pool adapter_loads adapter_hits evictions
    preemptions bytes_loaded max_logit_error slo_attainment total_p99_s""".split()
    assert fields.keys() >= set(promised)


def test_the_parts_of_the_start_are_told_and_add_up(report: ScaleReport) -> None:
    parts = ["imports", "device", "warm-up", "pool", "host memory", "adapters", "first token"]
    assert list(report.start_s) == parts and all(seconds >= 0 for seconds in report.start_s.values())
    assert sum(report.start_s.values()) == report.first_ready_s > 0
    assert report.kernels_cached is None


def test_a_part_that_comes_twice_is_counted_once() -> None:
    clock = StartClock()
    for part in ("device", "weights", "device", "end"):
        clock.note(part)
    assert list(clock.parts) == ["imports", "device", "weights"]
    assert str(clock).startswith("imports ") and clock.seconds == pytest.approx(process_seconds(), abs=0.5)


def test_a_failure_is_said(report: ScaleReport) -> None:
    assert "FAILED: answers checked" in replace(report, wrong=1).table()
    assert replace(report, finished=7).failed == ["requests finished"]
    assert replace(report, adapter_tokens=0).failed == ["adapters change the answers"]
    assert replace(report, max_relative_error=0.5).failed == ["largest logit error"]


def test_a_wrong_weight_is_seen() -> None:
    """The answers of a model whose weights change after they were given are found wrong."""

    class Changed(Engine):
        def generate(self, *args: Any) -> Any:
            done = super().generate(*args)
            if self.steps > 3:
                self.executor.model.weights.layers[1].down[...] *= -1
            return done

    def changed(options: ScaleOptions, note: Note) -> Engine:
        engine = on_host(options, note)
        engine.__class__ = Changed
        return engine

    with without_shape_checks():
        report = run_scale_demo(replace(SMALL, requests=3, checked=2), lambda _: None, open_with=changed)
    assert report.failed


def test_arrivals_follow_the_rate_and_names_the_power_law() -> None:
    trace = replace(SMALL, requests=400, rate=50.0, adapters=1000).trace()
    assert len(trace) == 400 and trace[-1].time == pytest.approx(8, rel=0.3)
    assert np.median([arrival.adapter for arrival in trace]) < 200  # u ** (1 / 0.3)
    assert replace(SMALL, seed=1).trace() != SMALL.trace() == replace(SMALL).trace()


def test_lengths_are_within_the_models_positions() -> None:
    longest = CONFIG.max_position_embeddings
    options = replace(SMALL, lengths=(2, 10 * longest), requests=200)
    assert options.engine_config().max_length == 2 * (longest // 2)
    assert max(arrival.prompt for arrival in options.trace()) < longest // 2


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    seven = ScaleOptions()
    with pytest.raises(ConfigError, match=r"weights take 13.5 GB.*of the GPU's 10.0 GB"):
        seven.check_device(10 * 10**9, 0)
    with pytest.raises(ConfigError, match=r"12\.0 GB are in use"):
        seven.check_device(24 * 10**9, 12 * 10**9)
    seven.check_device(24 * 10**9, 10**9)
    with pytest.raises(ConfigError, match="GB of host memory"):
        replace(seven, distinct=2000, kind=AdapterKind((4096,))).check_host()


WRONG: list[dict[str, Any]] = [{"adapters": 0}, {"requests": -1}, {"model": "no-such"}, {"checked": -1}, {"seed": -1}]


@pytest.mark.parametrize("wrong", WRONG)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(SMALL, **wrong)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama-7b"], "needs a GPU: add --device cuda"),
        (["--ranks", "8"], "--ranks needs --model"),
        (["--dtype", "float16"], "on cpu it can be float32 or float64"),
        (["--device", "cuda", "--model", "gpt"], "llama-7b, llama-13b"),
        (["--device", "cuda", "--model", "llama-7b", "--targets", "x"], "q_proj"),
    ],
)
def test_the_command_says_what_to_do(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# --- shards ---

ARGUMENTS = "--adapters 30 --distinct 3 --ranks 3,2 --requests 6 --checked 3 --pool-pages 3000".split()


@pytest.mark.parametrize("shards", [2, 4])
def test_a_folder_is_served_by_threads(shards: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", str(model_folder()), *ARGUMENTS, "--shards", str(shards), "--json"]
    with without_shape_checks():
        assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["wrong"] == 0 and report["correct"] == 3 and report["adapter_tokens"] > 0
    assert report["sent"]["shards"] == shards and 0 < report["sent"]["lora_nbytes"] < report["sent"]["nbytes"]
    assert not report["sent"]["as_of_a_ring"]


@needs_mpi
@pytest.mark.parametrize("shards", [2, 4])
def test_a_folder_is_served_by_processes_of_mpirun(shards: int) -> None:
    started = mpirun(shards, "demo", "--communicator", "mpi", "--model", str(model_folder()), *ARGUMENTS, "--json")
    out, err = started.communicate(timeout=100)
    assert started.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["wrong"] == 0 and report["correct"] == 3 and report["sent"]["shards"] == shards
    assert report["sent"]["as_of_a_ring"] and len(out.splitlines()) == 1, "only shard 0 speaks"


def test_a_wrong_weight_of_one_shard_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that answers are checked against are read anew, not taken from the shards."""
    before = Follower.join

    def join(self: Follower) -> None:
        before(self)
        self.weights.layers[1].down[...] *= -1

    monkeypatch.setattr(Follower, "join", join)
    with without_shape_checks():
        assert run_scale_demo(replace(SMALL, requests=3, pool_pages=3000, shards=2), lambda _: None).failed


def test_what_a_shard_holds_must_fit() -> None:
    """Half of a 13B model fits where the whole does not."""
    options = ScaleOptions(model="llama-13b", shards=2)
    options.check_device(24 * 10**9, 10**9)
    with pytest.raises(ConfigError, match="take a smaller --model"):
        replace(options, shards=1).check_device(24 * 10**9, 10**9)
