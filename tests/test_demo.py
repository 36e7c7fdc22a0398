"""The demo: every answer right, the pool really full, the same counts for the same seed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slora_ref.bench.occupancy import FREE_COLOUR, KV_COLOUR
from slora_ref.demo import DemoOptions, DemoReport, run_demo
from slora_ref.demo.options import check_pool
from slora_ref.demo.plot import ADAPTER_COLOURS, page_image, stretches
from slora_ref.demo.questions import LONGEST_ANSWER, LONGEST_PROMPT, adapter_names, draw_questions
from slora_ref.demo.verify import Verifier
from slora_ref.demo.watch import live_line, pool_bar
from slora_ref.engine import Completion, Engine
from slora_ref.errors import ConfigError
from slora_ref.pager import PoolUsage
from slora_ref.request import FinishReason, SamplingParams
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
    assert report.adapter_hits + report.adapter_waits == report.requests
    assert report.adapter_waits > 0
    assert report.adapter_loads > 48
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


def test_in_float64_only_rounding_differs() -> None:
    """So the logit error in float32 is rounding, not a fault: it shrinks with the numbers' own."""
    report = run_demo(DemoOptions(adapters=60, requests=20, dtype="float64"), quiet)
    assert report.failed == []
    assert report.max_logit_error < 1e-11


def test_requests_at_a_rate_come_one_after_the_other() -> None:
    report = run_demo(DemoOptions(adapters=40, requests=12, rate=40.0), quiet)
    assert report.wrong == 0
    assert report.seconds > 0.1  # the last of twelve arrivals at 40 a second


def test_the_table_explains_itself(report: DemoReport) -> None:
    """Its numbers add up in the reader's head, steps are the same steps everywhere, and each check names its bar."""
    table = report.table()
    found = {
        name: int(re.search(rf"{name}\D+(\d+)", table)[1])  # type: ignore[index]
        for name in ("adapter already in the pool", "waited for their adapter", "requests")
    }
    assert found["adapter already in the pool"] + found["waited for their adapter"] == 120 == found["requests"]
    assert len(re.findall(r"\(bar: ", table)) == 3
    assert f"in {report.steps:,} steps" in table
    assert report.history[-1].startswith(f"step {report.steps:4d} ")
    assert report.history[0].startswith("step    1 ")
    assert "FAILED" not in table


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": 1, "correct": 119},
        {"task_correct": 117},
        {"max_logit_error": 1.1e-4},
        {"max_logit_error": 1e-8, "dtype": "float64"},
        {"max_logit_error": float("nan")},
    ],
)
def test_each_bar_can_fail(report: DemoReport, change: dict[str, object]) -> None:
    assert report.failed == []
    broken = replace(report, **change)  # type: ignore[arg-type]
    assert len(broken.failed) == 1
    assert f"FAILED: {broken.failed[0]}" in broken.table()


def test_the_smallest_pool_serves_every_request() -> None:
    """What the check before serving demands is enough, and one page less is refused before anything is made."""
    with pytest.raises(ConfigError, match="--pool-pages") as refusal:
        check_pool(10, TASKS)
    needed = int(re.search(r"--pool-pages (\d+)", str(refusal.value))[1])  # type: ignore[index]
    assert run_demo(DemoOptions(adapters=34, requests=12, pool_pages=needed), quiet).failed == []
    with pytest.raises(ConfigError, match=f"the pool has {needed - 1} pages, but the largest request takes {needed}"):
        run_demo(DemoOptions(adapters=34, requests=12, pool_pages=needed - 1), quiet)


def test_no_prompt_is_longer_than_the_one_the_pool_is_checked_for() -> None:
    questions = draw_questions(adapter_names(5), 500, seed=0, rate=None)
    assert max(len(question.prompt) for question in questions) == len(LONGEST_PROMPT)


def test_a_mixed_up_adapter_would_be_found() -> None:
    """The opposite check: answers made with another adapter, or with none, are called wrong."""
    engine = Engine.from_pretrained(MODEL_FOLDER)
    first, second = list(TASKS)[:2]
    engine.add_adapter(first, ADAPTERS_FOLDER / first)
    params = SamplingParams(max_tokens=LONGEST_ANSWER, keep_logits=True)
    with_first, with_none = engine.generate(["garden=", "garden="], params, [first, None])
    verifier = Verifier(MODEL_FOLDER, LONGEST_ANSWER)
    assert verifier.check(with_first, ADAPTERS_FOLDER / first).right
    assert verifier.check(with_first, ADAPTERS_FOLDER / first).logit_error < 1e-4
    for completion, folder in ((with_first, second), (with_none, first)):
        verdict = verifier.check(completion, ADAPTERS_FOLDER / folder)
        assert not verdict.right
        assert verdict.logit_error > 0.1


def served(params: SamplingParams, steps: int | None = None) -> Completion:
    """garden= in capitals; with `steps`, aborted after so many."""
    engine = Engine.from_pretrained(MODEL_FOLDER)
    engine.add_adapter("upper-case", ADAPTERS_FOLDER / "upper-case")
    if steps is None:
        return engine.generate(["garden="], params, "upper-case")[0]
    number = engine.add_request("garden=", params, "upper-case")
    for _ in range(steps):
        engine.step()
    engine.abort(number)
    return next(news.completion for news in engine.step() if news.completion is not None)


def test_an_answer_that_is_cut_short_is_wrong() -> None:
    """The opposite check: every token of it is the dense model's, but the answer did not end."""
    verifier, folder = Verifier(MODEL_FOLDER, LONGEST_ANSWER), ADAPTERS_FOLDER / "upper-case"
    params = SamplingParams(max_tokens=LONGEST_ANSWER, keep_logits=True)
    whole, short = served(params), served(replace(params, max_tokens=3))
    stopped, aborted = served(replace(params, stop=("D",))), served(params, 4)
    endless = served(replace(params, ignore_eos=True))
    assert verifier.check(whole, folder).right
    assert (short.text, short.finish_reason) == ("GAR", FinishReason.LENGTH)
    assert (stopped.finish_reason, aborted.finish_reason) == (FinishReason.STOP, FinishReason.ABORT)
    assert 0 < len(aborted.token_ids) < len(whole.token_ids)
    assert len(endless.token_ids) == LONGEST_ANSWER
    for completion in (short, stopped, aborted, endless):
        verdict = verifier.check(completion, folder)
        assert verdict.logit_error < 1e-4, completion.finish_reason
        assert not verdict.right, completion.finish_reason
    for reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH):
        assert not verifier.check(replace(whole, finish_reason=reason), folder).right
    assert not verifier.check(replace(whole, token_ids=(), logits=whole.logits[: len(whole.prompt_ids)]), folder).right
    full = Verifier(MODEL_FOLDER, 3)  # the opposite of the opposite: as long as an answer may be
    assert full.check(short, folder).right


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


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 200])
@pytest.mark.parametrize("requests", [7, 256, 100_000])
def test_the_live_line_always_shows_how_much_is_done(columns: int, requests: int) -> None:
    usage, count = PoolUsage(kv=500, adapter=500, free=0), f"done {requests}/{requests}"
    line = live_line(usage, " 64 running 48 adapters", count, columns)
    assert line.endswith(count)
    assert len(line) < columns
    assert "█" in line or columns == 24
    assert ("running" in line) == (columns >= 60 or (columns == 40 and requests < 100))


def test_the_picture_is_the_same_for_the_same_run(tmp_path: Path) -> None:
    options = DemoOptions(adapters=60, requests=20)
    files = [tmp_path / name for name in ("a.svg", "b.svg", "c.svg")]
    for file in files:
        run_demo(replace(options, requests=20 + (file.name == "c.svg")), quiet, plot=file)
    texts = [file.read_text(encoding="utf-8") for file in files]
    digests = [re.findall(r"sha256:\w{64}", text) for text in texts]
    assert texts[0] == texts[1]
    assert digests[0] == digests[1] != digests[2]
    assert [len(found) for found in digests] == [1, 1, 1]
    assert "<svg" in texts[0]
    assert "<image" not in texts[0]  # viewers would blur it


def test_the_rectangles_cover_each_page_once_in_its_colour() -> None:
    owners = np.random.default_rng(0).integers(-2, 9, 330).astype(np.int32)
    image = page_image(owners)
    drawn = np.full_like(image, -1)
    for kind in range(2 + len(ADAPTER_COLOURS)):
        for (left, top), _, (right, bottom), *_ in stretches(image, kind).tolist():
            assert (drawn[top:bottom, left:right] == -1).all()
            drawn[top:bottom, left:right] = kind
    assert np.array_equal(drawn, image)
    assert (image.ravel()[330:] == -1).all()


def test_the_kinds_are_told_apart_in_grey() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    shades = [grey(colour) for colour in ADAPTER_COLOURS]
    assert grey(KV_COLOUR) + 0.2 < min(shades)
    assert max(shades) + 0.2 < grey(FREE_COLOUR)
