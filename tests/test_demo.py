"""The demo: every answer right, the pool really full, the same counts for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slora_ref.demo import DemoOptions, DemoReport, run_demo
from slora_ref.demo.questions import adapter_names, draw_questions
from slora_ref.demo.verify import Verifier
from slora_ref.demo.watch import pool_bar
from slora_ref.engine import Engine
from slora_ref.pager import PoolUsage
from slora_ref.request import SamplingParams
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS


def quiet(_: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return run_demo(DemoOptions(adapters=300, requests=120, seed=1), quiet)


def test_every_answer_is_the_dense_models(report: DemoReport) -> None:
    assert report.wrong == 0
    assert report.correct == report.requests == 120
    assert report.task_correct >= 0.98 * report.requests
    assert report.max_logit_error <= 1e-4


def test_the_pool_was_the_limit(report: DemoReport) -> None:
    assert report.peak_resident <= 48 < report.adapters_used
    assert report.evictions > 0
    assert report.adapter_loads - report.evictions <= 48
    assert report.adapter_loads + report.adapter_hits >= report.requests
    assert report.pool.peak_used <= report.pool.pages
    assert report.pool.peak_kv > 0
    assert report.preemptions == 0


def test_the_json_has_the_promised_fields(report: DemoReport) -> None:
    promised = """model device adapters_registered adapters_used requests correct wrong task_correct tokens seconds
    tokens_per_s requests_per_s first_token_p50_s first_token_p99_s pool adapter_loads adapter_hits evictions
    preemptions bytes_loaded max_logit_error""".split()
    fields = report.as_json()
    assert fields.keys() >= set(promised)
    assert fields["pool"].keys() >= {"pages", "peak_kv", "peak_adapter", "peak_used"}


def test_the_same_seed_gives_the_same_run() -> None:
    options = DemoOptions(adapters=100, requests=30, seed=5)
    first, second = run_demo(options, quiet), run_demo(options, quiet)
    counted = ("tokens", "steps", "adapter_loads", "evictions", "adapters_used", "task_correct", "history", "samples")
    assert [getattr(first, name) for name in counted] == [getattr(second, name) for name in counted]


def test_requests_at_a_rate_come_one_after_the_other() -> None:
    report = run_demo(DemoOptions(adapters=40, requests=12, rate=40.0), quiet)
    assert report.wrong == 0
    assert report.seconds > 0.1  # the last of twelve arrivals at 40 a second


def test_a_mixed_up_adapter_would_be_found() -> None:
    """The opposite check: answers made with another adapter, or with none, are called wrong."""
    engine = Engine.from_pretrained(MODEL_FOLDER)
    first, second = list(TASKS)[:2]
    engine.add_adapter(first, ADAPTERS_FOLDER / first)
    params = SamplingParams(max_tokens=32, keep_logits=True)
    with_first, with_none = engine.generate(["garden=", "garden="], params, [first, None])
    verifier = Verifier(MODEL_FOLDER)
    assert verifier.check(with_first, ADAPTERS_FOLDER / first).right
    assert verifier.check(with_first, ADAPTERS_FOLDER / first).logit_error < 1e-4
    for completion, folder in ((with_first, second), (with_none, first)):
        verdict = verifier.check(completion, ADAPTERS_FOLDER / folder)
        assert not verdict.right
        assert verdict.logit_error > 0.1


def test_names_share_trained_weights_but_not_pages() -> None:
    names = adapter_names(2000)
    assert len({name for name, _ in names}) == 2000
    assert {task for _, task in names} == set(TASKS)


def test_popularity_is_the_power_law() -> None:
    """P(adapter i) = ((i + 1) / n)^0.3 - (i / n)^0.3: the first of 200 adapters gets a fifth of the requests."""
    names = [(str(i), next(iter(TASKS))) for i in range(200)]
    picks = np.array([int(q.adapter) for q in draw_questions(names, 3000, seed=0, rate=None)])
    assert abs((picks == 0).mean() - (1 / 200) ** 0.3) < 0.03
    assert abs((picks < 20).mean() - (20 / 200) ** 0.3) < 0.03


def test_the_bar_shows_what_is_there() -> None:
    bar = pool_bar(PoolUsage(kv=1, adapter=50, free=949), width=20)
    assert (bar.count("█"), bar.count("▒"), len(bar)) == (1, 1, 20)
    assert pool_bar(PoolUsage(kv=500, adapter=500, free=0), width=20) == "█" * 10 + "▒" * 10


def test_the_picture_is_the_same_for_the_same_run(tmp_path: Path) -> None:
    options = DemoOptions(adapters=60, requests=20)
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        run_demo(options, quiet, plot=file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"<svg" in files[0].read_bytes()
