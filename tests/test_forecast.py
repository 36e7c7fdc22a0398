"""Forecast: what it says in any step of a run is never exceeded later, in any mode; and what it expects of outputs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig
from strategies import Ask

from slora_ref.config import EngineConfig
from slora_ref.request import Request, SamplingParams, Sequence
from slora_ref.scheduler import Forecast
from slora_ref.step import Step


class Recorder(Rig):
    """A rig with more pages than anybody needs, that records in each step what was forecast and what was then held.

    Both in tokens. Claims are the waiting requests; none of them lacks anything but its adapter.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(2000, [1, 1, 1], **options)
        self.forecasts: list[int] = []
        self.held: list[int] = []

    def _compute(self, step: Step) -> None:
        scheduler = self.scheduler
        self.forecasts.append(scheduler.forecast.peak(scheduler.running, scheduler.waiting))
        super()._compute(step)
        self.held.append(sum(s.computed for s in scheduler.running))


@st.composite
def modes(draw: st.DrawFn) -> dict[str, Any]:
    """How prefill runs: all that makes a sequence lag."""
    return {
        "max_running": 6,
        "max_batched_tokens": draw(st.integers(7, 16)),
        "chunked_prefill": draw(st.booleans()),
        "separate_prefill": draw(st.booleans()),
    }


@st.composite
def arrivals(draw: st.DrawFn, longest: int) -> list[tuple[int, Ask]]:
    """Up to six requests with the step before which they come. They run to their full lengths: the worst."""
    coming = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.integers(1, longest))
        tokens = draw(st.integers(1, min(9, longest - prompt + 1)))
        coming.append((draw(st.integers(1, 6)), Ask(draw(st.sampled_from([None, 0, 1, 2])), prompt, tokens, tokens)))
    return coming


@given(options=modes(), data=st.data())
@settings(max_examples=max(150, settings.default.max_examples))
def test_what_is_forecast_is_never_exceeded(options: dict[str, Any], data: st.DataObject) -> None:
    """Class of fault: a prompt cut into pieces, or a pause, keeps somebody alive longer than lockstep would.

    Adapters come when they like. As long as nobody new arrives, the forecast of each step bounds all that follows, and
    no later forecast is above it: what was admitted once has its place for good.
    """
    rig = Recorder(**options)
    rig.loader.polls = {i: data.draw(st.integers(0, 8)) for i in range(3)}
    coming = data.draw(arrivals(20 if options["chunked_prefill"] else options["max_batched_tokens"]))
    settled = step = 0
    while step < 7 or rig.alive:
        step += 1
        for when, ask in coming:
            if when == step:
                rig.ask(ask)
        rig.step()
        if step <= 6 or any(s.adapter_id in rig.last.resident for s in rig.scheduler.waiting):
            settled = len(rig.forecasts)  # somebody comes, or waits for a step of prefill with room
    forecasts, held = rig.forecasts[settled:], rig.held[settled:]
    for i, forecast in enumerate(forecasts):
        assert forecast >= max(held[i:]), (i, forecast, held)
    assert forecasts == sorted(forecasts, reverse=True)


def a_sequence(prompt: int, max_tokens: int, generated: int = 0, computed: int | None = None) -> Sequence:
    """A sequence that has generated so many tokens and is decoding, unless fewer are computed."""
    request = Request(prompt_ids=(0,) * prompt, params=SamplingParams(max_tokens=max_tokens))
    sequence = Sequence(0, request, -1, seed=0)
    sequence.tokens += [1] * generated
    sequence.computed = len(sequence.tokens) - 1 if computed is None else computed
    return sequence


def forecast_of(*generated: int, **options: Any) -> Forecast:
    """A forecast that has seen requests end after so many generated tokens."""
    forecast = Forecast(EngineConfig(**options))
    for count in generated:
        forecast.observe(count)
    return forecast


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "generated", "peak"),
    [
        (10, 20, 1, 13),  # 4 are expected in all, so 3 are to come; the last one takes no pages
        (10, 20, 3, 13),
        (10, 20, 7, 17),  # longer than expected already: the next token is
        (10, 20, 19, 29),
        (10, 2, 1, 11),  # it may not get as far as expected
        (1, 20, 1, 4),  # the prompt is no part of what is expected
    ],
)
def test_expected_counts_with_the_mean_of_the_outputs(prompt: int, max_tokens: int, generated: int, peak: int) -> None:
    forecast = forecast_of(3, 5, 4, admission="expected")
    assert forecast.peak([a_sequence(prompt, max_tokens, generated)]) == peak


def test_expected_rounds_up_and_counts_in_full_before_anything_has_ended() -> None:
    assert forecast_of(admission="expected").peak([a_sequence(10, 20, 1)]) == 29
    assert forecast_of(3, 4, admission="expected").peak([a_sequence(10, 20, 1)]) == 13


def test_max_tokens_expects_nothing() -> None:
    assert forecast_of(3, 5, 4).peak([a_sequence(10, 20, 1)]) == 29


# Three sequences: one decodes and has 5 tokens to come; the prompts of two, 9 and 4 tokens, wait; both then have one
# token to come. In lockstep all would be held at once for one step only: 10 + 9 + 4. How long do the two really stay?
LAGS = {
    "at once": ({"max_batched_tokens": 40}, 23),
    "beside decoding, in pieces of 6": ({"max_batched_tokens": 8}, 11 + 9 + 4),  # pieces: 6, then 3 + 3, then 1
    "whole": ({"max_batched_tokens": 10, "chunked_prefill": False}, 12 + 9 + 4),  # a step each, and one of decoding
    "alone, in pieces of 4": ({"max_batched_tokens": 4, "max_running": 3, "separate_prefill": True}, 14 + 9 + 4),
}


@pytest.mark.parametrize("mode", LAGS)
def test_prefill_keeps_its_sequences_alive(mode: str) -> None:
    """The numbers of each mode by hand; with the sequences in lockstep they would be too low."""
    options, peak = LAGS[mode]
    forecast = forecast_of(**({"max_running": 4} | options))
    sequences = [a_sequence(10, 5), a_sequence(9, 1, computed=0), a_sequence(4, 1, computed=0)]
    assert forecast.peak(sequences) == peak


def test_decoding_takes_rows_from_a_prompt() -> None:
    """Three that decode leave 2 rows of 5, so a prompt of 8 takes 4 steps; by then the three hold 13 each."""
    forecast = forecast_of(max_running=4, max_batched_tokens=5)
    assert forecast.peak([*(a_sequence(10, 5) for _ in range(3)), a_sequence(8, 1, computed=0)]) == 3 * 13 + 8


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Decoding, or with part of its prompt to be computed."""
    prompt, max_tokens = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        return a_sequence(prompt, max_tokens, computed=draw(st.integers(0, prompt - 1)))
    return a_sequence(prompt, max_tokens, generated=draw(st.integers(0, max_tokens - 1)))


@given(options=modes(), running=st.lists(sequences(), max_size=4), waits=st.lists(sequences(), min_size=1, max_size=3))
@settings(max_examples=max(200, settings.default.max_examples))
def test_a_claim_that_starts_never_needs_more_than_was_kept_for_it(
    options: dict[str, Any], running: list[Sequence], waits: list[Sequence]
) -> None:
    """Or a request might not fit when its adapter comes, though nobody but those who were let pass is there."""
    forecast = forecast_of(**options)
    for claim in waits:
        claim.computed = 0
    assert forecast.peak([*running, waits[0]], waits[1:]) <= forecast.peak(running, waits)


@pytest.mark.parametrize("chunked", [True, False])
def test_each_claim_may_need_a_step_of_prefill_of_its_own(chunked: bool) -> None:
    """Two prompts of 5 fit into one step of 10, but the claim's comes later. Nothing is kept for it in vain, either."""
    forecast = forecast_of(max_running=4, max_batched_tokens=10, separate_prefill=True, chunked_prefill=chunked)
    long, ends, prompt, claim = (a_sequence(*shape) for shape in ((10, 9), (10, 1), (5, 4), (5, 1)))
    prompt.computed = claim.computed = 0
    before = forecast.peak([long, ends, prompt], [claim])
    assert before == 12 + 10 + 7 + 5  # in the third step: two of prefill, one in which `ends` generates its token
    prompt.computed = 5
    prompt.tokens.append(1)
    assert forecast.peak([long, ends, prompt], [claim]) <= before
    assert forecast.peak([long, ends, prompt, claim]) <= before


def test_a_claim_counts_in_full_whenever_it_starts() -> None:
    """Together from now on they would hold 9 + 5 tokens at most: the claim would be over before the other is long."""
    running, claim = a_sequence(1, 10), a_sequence(5, 1, computed=0)
    forecast = forecast_of()
    assert forecast.peak([running, claim]) == 10
    assert forecast.peak([running], [claim]) == 15
    assert forecast.fits([running], [claim], 15) and not forecast.fits([running], [claim], 14)
    assert forecast.fits([running, claim], [], 10) and not forecast.fits([running, claim], [], 9)
