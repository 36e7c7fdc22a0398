"""Points of the paper run for real: on the CPU in small, and what the simulator says of the same requests on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slora_ref.bench.real import EXPERIMENTS, SCALES, run_points
from slora_ref.bench.real.points import RealPoint
from slora_ref.bench.real.rows import HEAD
from slora_ref.bench.real.session import RealSession, open_real
from slora_ref.bench.real.simulated import simulate
from slora_ref.cli import main

SMALL = replace(SCALES["cpu"], requests=10, lengths=(4, 12), tight_tokens=6_000, distinct=4)
GPU = SCALES["cuda"]


def test_every_system_answers_as_the_engine_does() -> None:
    said: list[str] = []
    rows = run_points(EXPERIMENTS, SMALL, said.append)
    assert said[0] == HEAD and len(said) == 1 + len(rows) == 1 + sum(map(len, EXPERIMENTS.values()))
    for row in rows:
        assert row["requests"] == 10 and row["first_tokens_as_slora"] == 1.0
        assert row["requests_per_s"] == pytest.approx(10 / row["seconds"]) and row["bound_requests_per_s"] is None
        assert (row["merges"] > 0) == (row["point"] == "n=5 merge"), "n=1 was merged before"


def test_a_point_that_two_experiments_share_is_run_once() -> None:
    rows = run_points(("fig5", "fig9"), SMALL, lambda line: None)
    pairs = [[row["seconds"] for row in rows if row["point"] == name] for name in ("n=1 slora", "n=5 slora")]
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in pairs)


def test_merged_weights_are_taken_out_after_a_run() -> None:
    with open_real(SMALL) as session:
        before = [layer.qkv.copy() for layer in session.base.weights.layers]
        session.run(RealPoint("merge", 5))
        assert all((layer.qkv == kept).all() for layer, kept in zip(session.base.weights.layers, before, strict=True))


def simulated(point: RealPoint, losses: bool) -> tuple[float, float]:
    session = RealSession(GPU, base=None, folders=[])  # type: ignore[arg-type]  the requests need neither
    return simulate(point, GPU, session.arrivals(point.adapters), losses)


@pytest.mark.parametrize("losses", [True, False])
def test_the_simulator_has_the_papers_order_on_a_gpu_too(losses: bool) -> None:
    for adapters, merged_wins in ((1, True), (5, False)):
        merge, fly = (simulated(RealPoint(system, adapters), losses)[0] for system in ("merge", "slora"))
        assert (merge > fly) == merged_wins
    assert simulated(RealPoint("bmm", 100), losses)[0] < simulated(RealPoint("slora", 100), losses)[0]
    one, two = (
        simulated(RealPoint(system, 200, True, share), losses)[1] for system, share in (("slora", 0), ("split", 0.4))
    )
    assert two < one


def test_no_real_system_beats_a_gpu_without_losses() -> None:
    point = RealPoint("slora", 100)
    assert simulated(point, losses=True)[0] < simulated(point, losses=False)[0]


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SCALES, "cpu", SMALL)  # type: ignore[misc, arg-type]
    assert main(["paper", "fig9", "--device", "cpu", "--json"]) == 0
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["bench"] == "paper" and out["command"] == "slora-ref paper fig9 --device cpu --json"
    assert [row["point"] for row in out["rows"]] == [point.name for point in EXPERIMENTS["fig9"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig6", "--device", "cpu"], "fig5, fig9, fragmentation have"),
        (["fig9", "--device", "cpu", "--svg"], "the simulator's"),
        (["fig9", "--device", "cpu", "--variant", "ours"], "the simulator's"),
    ],
)
def test_what_is_not_run_for_real_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *arguments]) == 2
    assert message in capsys.readouterr().err
