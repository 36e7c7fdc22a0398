"""The replayed experiments: the authors' tables as they are read, statistics that can be counted by hand, and six fixed
points in the right simulator and in three wrong ones, against the committed comparison of all points.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from slora_ref.cli import main
from slora_ref.paper import studies
from slora_ref.paper.bars import Closeness, closeness, errors, shard_closeness
from slora_ref.paper.constants import fitted_constants
from slora_ref.paper.experiments import EXPERIMENTS
from slora_ref.paper.findings import noticeable_pairs
from slora_ref.paper.packed import play_packed
from slora_ref.paper.page import page, read_rows
from slora_ref.paper.play import Row, compare, play, play_all
from slora_ref.paper.points import FITTED_RUNS, FITTED_SHARDS, Point, null_model
from slora_ref.paper.real_page import FILES, committed_run
from slora_ref.paper.run import Run
from slora_ref.paper.systems import config_of, original_tokens, policy_of, system_of
from slora_ref.paper.wrong import FIXED, SIMULATORS, committed, own_points, play_in
from slora_ref.policy import AdapterClusters, EarlyAbort, OneAdapter, OriginalEarlyAbort
from slora_ref.simulate.datasheet import GPUS, MODELS, POOL_TOKENS
from slora_ref.simulate.roofline import token_bytes, weight_bytes

SHORT = Run(setting="S2", gpu="a10g", adapters=20, rate=2.0, duration=6.0)


def row(metric: str, ours: float, theirs: float, fitted: bool = False, system: str = "slora") -> Row:
    return Row(
        point=f"here {system}",
        variant="original",
        metric=metric,
        ours=ours,
        theirs=theirs,
        null_model=2.0 if metric == "throughput" else None,
        rel_error=ours / theirs - 1,
        fitted=fitted,
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("table3", 20),
        ("table4", 5),
        ("table5", 4),
        ("fig5", 80),
        ("fig6", 27),
        ("fig7", 14),
        ("fig8", 18),
        ("fig9", 96),
        ("fig10", 30),
        ("fig11", 40),
        ("fig12", 25),
    ],
)
def test_every_number_of_the_authors_has_its_point(name: str, count: int) -> None:
    points = EXPERIMENTS[name]()
    assert len(points) == count
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert all(point.theirs for point in points)


def test_some_numbers_of_the_authors() -> None:
    fig5 = {point.name: point for point in EXPERIMENTS["fig5"]()}
    assert fig5["S2 a100-80 n=20 R=10 bmm"].theirs == {"throughput": 0.27, "latency": 1255.6}
    fig11 = {point.name: point for point in EXPERIMENTS["fig11"]()}
    assert fig11["S4 a100-40 alpha=1 cv=1 d=32"].theirs == {"throughput": 1.17, "attainment": 0.275}
    table3 = {point.name: point for point in EXPERIMENTS["table3"]()}
    assert table3["S4 a100-80 n=1000 slora"].run.rate == 6.0 and "S1 a100-80 n=100 packed" not in table3
    fig6 = {point.name: point for point in EXPERIMENTS["fig6"]()}
    assert fig6["S4 a100-80 n=400 R=8 bmm"].theirs == {"throughput": 0.18}, "the rest are placeholders"


def test_the_five_fitted_runs_are_marked_wherever_they_appear() -> None:
    points = own_points()
    fitted = [point for point in points if point.fitted]
    assert len(points) == 47
    assert {point.run for point in fitted} == set(FITTED_RUNS) and len(fitted) == 6  # one is in both figures
    assert not any(replace(point.run, variant="ours") in FITTED_RUNS for point in fitted)


def test_the_null_model_knows_the_rate_and_a_capacity() -> None:
    assert null_model(SHORT, "throughput") == 1.58
    assert null_model(replace(SHORT, rate=1.5), "throughput") == 1.5
    assert null_model(SHORT, "latency") is None
    assert null_model(replace(SHORT, system="bmm"), "throughput") is None


def test_statistics_by_hand() -> None:
    assert errors([0.1, -0.3, 0.2]).median == pytest.approx(0.2) and errors([0.1, -0.3]).worst == 0.3
    rows = [
        row("throughput", 1.1, 1.0),
        row("throughput", 9.0, 1.0, fitted=True),
        row("throughput", 9.0, 1.0, system="bmm"),
        row("latency", 8.0, 10.0),
        row("attainment", 0.55, 0.5),
        row("attainment", 0.5, 0.9),
    ]
    close = closeness(rows)
    assert (close.throughput.count, close.throughput.worst) == (1, pytest.approx(0.1))
    assert close.latency.median == pytest.approx(0.2) and close.null_model.worst == pytest.approx(1.0)
    assert (close.attainment_near, close.attainment_count) == (1, 2)


def test_a_simulator_passes_only_if_it_keeps_every_bar() -> None:
    good = Closeness(
        throughput=errors([0.01]),
        latency=errors([0.05]),
        null_model=errors([0.2]),
        attainment_near=17,
        attainment_count=19,
    )
    assert good.passes
    for worse in (
        {"throughput": errors([0.03])},
        {"throughput": errors([0.0] * 8 + [0.07] * 2)},
        {"throughput": errors([0.0] * 30 + [0.11])},
        {"latency": errors([0.11])},
        {"latency": errors([0.0] * 30 + [0.31])},
        {"attainment_near": 16},
    ):
        assert not replace(good, **worse).passes


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_fixed_points_come_out_as_in_the_committed_comparison(simulator: str) -> None:
    """So what was committed is still what this code says."""
    expected = committed()["simulators"][simulator]["throughput_of"]
    runs = {point.name: point.run for point in own_points()}
    for name in FIXED:
        assert play_in(simulator, runs[name]).throughput == pytest.approx(expected[name], rel=1e-3), name


def test_the_committed_comparison_passes_the_right_simulator_and_fails_the_wrong_ones() -> None:
    found = committed()["simulators"]
    assert {name: entry["passes"] for name, entry in found.items()} == {name: name == "right" for name in SIMULATORS}


# --- several GPUs ---


def test_the_committed_rows_of_several_gpus_keep_the_bars() -> None:
    close = shard_closeness(read_rows("fig8"))
    assert (close.rows, close.ordered, len(close.ratios)) == (6, 6, 5) and close.passes
    assert all(abs(ours - theirs) <= 0.1 for ours, theirs in close.ratios)


def test_a_row_of_several_gpus_comes_out_as_committed() -> None:
    """And the two runs that were fitted on come out as the authors': the fit is of this code."""
    committed_rows = {row.point: row.ours for row in read_rows("fig8")}
    for point in EXPERIMENTS["fig8"]():
        if "S5 a100-40 gpus=2 n=10" in point.name or point.fitted:
            throughput = play(point.run, fitted_constants()).throughput
            assert throughput == pytest.approx(committed_rows[point.name], rel=1e-3), point.name
            if point.fitted:
                assert throughput == pytest.approx(point.theirs["throughput"], rel=2e-3)


def test_one_row_of_several_gpus_was_fitted_but_for_the_base_model() -> None:
    fitted = [point.name for point in EXPERIMENTS["fig8"]() if point.fitted]
    assert fitted == [f"S5 a100-40 gpus=4 n=10 {name}" for name in ("slora", "no-lora-messages")]
    assert not set(FITTED_SHARDS) & set(FITTED_RUNS)


def test_the_bars_of_several_gpus_by_hand() -> None:
    def rows(*triples: tuple[float, float, float]) -> list[Row]:
        names = ("slora", "no-lora-messages", "base")
        return [
            replace(row("throughput", ours, theirs, system=f"n={i} {name}"))
            for i, triple in enumerate(triples)
            for name, ours, theirs in zip(names, triple, (0.8, 1.0, 1.5), strict=True)
        ]

    good = shard_closeness(rows((0.75, 1.0, 1.1), (0.85, 1.0, 1.1)))
    assert good.ordered == 2 and good.worst_ratio == pytest.approx(0.05) and good.passes
    assert not shard_closeness(rows((0.75, 1.0, 0.9))).passes, "the base model is not the fastest"
    assert not shard_closeness(rows((0.65, 1.0, 1.1))).passes, "messages cost twice what they should"


def test_weights_and_pool_take_of_each_gpu_what_they_took_of_one() -> None:
    for gpu, shards, name in (("a100-40", 2, "llama-30b-m"), ("a100-80", 4, "llama-70b-m")):
        tokens, model, known = original_tokens(name, gpu, shards), MODELS[name], MODELS["llama-13b"]
        taken = weight_bytes(model) + tokens * token_bytes(model)
        one = weight_bytes(known) + POOL_TOKENS["llama-13b", gpu] * token_bytes(known)
        assert 0 <= shards * one - taken < token_bytes(model)
        assert taken < GPUS[gpu].times(shards).memory


def test_variants_differ_in_what_they_say_they_differ_in() -> None:
    original, paper, ours = (config_of(replace(SHORT, variant=variant)) for variant in ("original", "paper", "ours"))
    assert (original.join_every, original.blocking_loads, original.prefetch) == (10, True, 0)
    assert (paper.join_every, paper.blocking_loads, paper.separate_prefill, paper.eviction) == (1, False, True, "eager")
    assert (ours.separate_prefill, ours.eviction) == (False, "lru") and ours.prefetch > 0
    abort = replace(SHORT, policy="abort")
    assert isinstance(policy_of(abort)(), OriginalEarlyAbort)
    assert isinstance(policy_of(replace(abort, variant="paper"))(), EarlyAbort)
    assert isinstance(policy_of(replace(SHORT, policy="clusters", clusters=2, variant="ours"))(), AdapterClusters)
    assert isinstance(policy_of(replace(SHORT, system="merge"))(), OneAdapter)


@pytest.mark.parametrize("system", ["slora", "no-unify", "bmm", "merge", "peft", "packed"])
@pytest.mark.parametrize("variant", ["original", "paper", "ours"])
def test_every_system_serves_every_request(system: str, variant: str) -> None:
    adapters = 2 if system == "packed" else 20
    gpu = "a100-80" if system == "packed" else "a10g"
    run = replace(SHORT, system=system, adapters=adapters, gpu=gpu, variant=variant)
    service = play(run, fitted_constants())
    assert service.completed == service.requests == len(run.arrivals())


def test_packed_engines_share_one_gpu() -> None:
    """Two engines take longer than one alone would, and less than one after the other."""
    run = Run(setting="S2", gpu="a100-80", adapters=2, rate=4.0, duration=6.0, system="packed")
    both = [record.finished_at for record in play_packed(run, fitted_constants()) if record.finished_at is not None]
    alone = replace(system_of(replace(run, system="slora"), fitted_constants()), adapters=0).build()
    one = alone.play([replace(arrival, adapter=-1) for arrival in run.arrivals() if arrival.adapter == 0])
    assert max(both) > max(record.finished_at or 0.0 for record in one)
    assert len(both) == len(run.arrivals())


def test_a_run_that_two_experiments_share_is_played_once() -> None:
    told: list[tuple[int, int]] = []
    played = play_all([SHORT, replace(SHORT)], done=lambda *n: told.append(n), jobs=1)
    assert told == [(1, 1)] and set(played) == {SHORT}
    (compared,) = compare([Point(name="x slora", run=SHORT, theirs={"throughput": 2.0})], played)
    assert compared.ours == played[SHORT].throughput and compared.rel_error == pytest.approx(compared.ours / 2 - 1)


def test_the_command_prints_beside_theirs_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = Point(name="S2 a10g n=20 R=2 slora", run=SHORT, theirs={"throughput": 1.0, "attainment": 0.0})
    monkeypatch.setitem(EXPERIMENTS, "table4", lambda: [point])
    arguments = ["paper", "table4", "--variant", "paper", "--json", "--jobs", "1", "--svg", "--out", str(tmp_path)]
    assert main(arguments) == 0
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["experiment"] == "table4" and [r["variant"] for r in out["rows"]] == ["original"] * 2 + ["paper"] * 2
    assert out["median_rel_error"] == out["worst_rel_error"] == abs(out["rows"][0]["rel_error"])
    assert out["rows"][1]["rel_error"] is None, "theirs is 0"
    written = list(csv.DictReader((tmp_path / "table4.csv").read_text().splitlines()))
    assert [r["point"] for r in written] == [point.name] * 4
    assert "<svg" in (tmp_path / "table4.svg").read_text()


@pytest.mark.parametrize("arguments", [["nothing"], ["table4", "--svg"], ["table4", "--jobs", "0"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["paper", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2 and "Traceback" not in capsys.readouterr().err


def test_a_larger_rank_takes_longer_to_load_and_more_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "GROUND", replace(SHORT, rate=6.0))
    monkeypatch.setattr(studies, "RANKS", (8, 64))
    small, large = studies.rank_sweep()
    assert (small["rank"], large["rank"]) == (8, 64)
    assert large["load_seconds"] > small["load_seconds"] > 0
    assert large["adapter_share"] == pytest.approx(8 * small["adapter_share"], rel=0.3)


def test_two_pools_of_one_size_hold_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "GROUND", replace(SHORT, rate=6.0))
    monkeypatch.setattr(studies, "TIGHT_TOKENS", 6_000)
    monkeypatch.setattr(studies, "SHARES", (0.1, 0.4))
    one, *two = studies.fragmentation()
    for row in (one, *two):
        assert row["kv"] + row["adapter"] + row["free"] == pytest.approx(1) and row["refused"] == 0
        assert min(row["kv"], row["adapter"], row["free"]) > 0
    assert all(row["throughput"] < one["throughput"] and row["free"] > one["free"] for row in two)


def test_a_pair_of_systems_has_an_order_by_hand() -> None:
    near, far = (
        [row("throughput", 2.0, 1.0), row("throughput", 1.0, other, system="bmm")] for other in (1.02, 0.9)
    )
    assert not noticeable_pairs({"fig5": near, "fig6": []})
    (pair,) = noticeable_pairs({"fig5": far, "fig6": []})
    assert pair.right and pair.names == ("slora", "bmm") and pair.first == (2.0, 1.0)
    equal = [row("throughput", 2.0, 1.0), row("throughput", 2.0, 0.9, system="bmm")]
    assert not noticeable_pairs({"fig5": equal, "fig6": []})[0].right, "a tie is no order"


@pytest.mark.parametrize("name", FILES)
def test_what_was_run_for_real_has_the_papers_order(name: str) -> None:
    rows = {each["point"]: each for each in committed_run(name)["rows"]}
    assert rows["n=1 merge"]["requests_per_s"] > rows["n=1 slora"]["requests_per_s"]
    assert rows["n=5 merge"]["requests_per_s"] < rows["n=5 slora"]["requests_per_s"]
    assert all(rows[f"n={n} bmm"]["step_ms"] > rows[f"n={n} slora"]["step_ms"] for n in (5, 100))
    split = [each for each in rows.values() if each["system"] == "split"]
    one = rows["n=200 tight pool slora"]
    assert split and all(each["most_running"] < one["most_running"] for each in split)
    assert all(each["mean_running"] < one["mean_running"] for each in split)
    assert all(each["first_tokens_as_slora"] >= 0.95 for each in rows.values()), "rounding may turn a token or two"


def test_the_results_page_is_what_its_files_say() -> None:
    path = Path(__file__).parents[1] / "slora_ref" / "paper" / "results" / "README.md"
    assert path.read_text(encoding="utf-8") == page(), "python -m slora_ref.paper.page writes it anew"
