"""peak_tokens: the O(n log n) rule against looking at every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slora_ref.scheduler import Lifetime, peak_tokens

PUNCTUAL = st.builds(lambda left, tokens: (left, left, tokens), st.integers(1, 20), st.integers(1, 30))
LATE = st.builds(
    lambda late, left, tokens: (left + late, left, tokens), st.integers(0, 8), st.integers(1, 20), st.integers(1, 30)
)
LAGS = st.integers(0, 5)


def peak_in_lockstep(lives: list[Lifetime]) -> int:
    """Every step looked at: in step t each sequence with t tokens to go generates its t-th, and the rest have ended."""
    steps = range(1, max((left for _, left, _ in lives), default=0) + 1)
    return max((sum(tokens - 1 + t for _, left, tokens in lives if t <= left) for t in steps), default=0)


def peak_as_defined(lives: list[Lifetime], lag: int) -> int:
    """Every step looked at, by the definition in Lifetime's docstring."""
    steps = range(1, max((end + lag for end, _, _ in lives), default=0) + 1)
    held = (sum(tokens - 1 + min(t, left) for end, left, tokens in lives if t <= end + lag) for t in steps)
    return max(held, default=0)


def peak_of_a_run(lives: list[Lifetime], pauses: list[list[int]]) -> int:
    """One real run: sequence i generates nothing in the steps pauses[i], and otherwise a token a step."""
    peak, generated = 0, [0] * len(lives)
    for step in range(1, 60):
        now = 0
        for i, (_, left, tokens) in enumerate(lives):
            if generated[i] < left:  # alive, so it holds pages, in a pause too
                generated[i] += step not in pauses[i]
                now += tokens - 1 + generated[i]
        peak = max(peak, now)
    return peak


@given(lives=st.lists(PUNCTUAL, max_size=8))
def test_where_nothing_lags_it_is_exact(lives: list[Lifetime]) -> None:
    assert peak_tokens(lives) == peak_in_lockstep(lives)


@given(lives=st.lists(LATE, max_size=8), lag=LAGS)
def test_with_lag_it_is_what_the_definition_says(lives: list[Lifetime], lag: int) -> None:
    assert peak_tokens(lives, lag) == peak_as_defined(lives, lag)


@given(lives=st.lists(LATE, max_size=6), lag=LAGS, data=st.data())
def test_no_run_exceeds_it(lives: list[Lifetime], lag: int, data: st.DataObject) -> None:
    """Each sequence pauses when it likes, as often as it may."""
    steps = st.integers(1, 40)
    pauses = [data.draw(st.lists(steps, max_size=end - left + lag, unique=True)) for end, left, _ in lives]
    assert peak_of_a_run(lives, pauses) <= peak_tokens(lives, lag)


@given(lives=st.lists(LATE, max_size=8), lag=LAGS)
def test_it_lies_between_what_is_held_now_and_the_full_lengths(lives: list[Lifetime], lag: int) -> None:
    known = sum(tokens for _, _, tokens in lives)
    assert known <= peak_tokens(lives, lag) <= known + sum(left - 1 for _, left, _ in lives)


@given(lives=st.lists(LATE, min_size=1, max_size=8), lag=LAGS, data=st.data())
def test_one_sequence_less_or_less_lag_never_needs_more(lives: list[Lifetime], lag: int, data: st.DataObject) -> None:
    """Or an abort could make the forecast grow, and an admission that was right turn out wrong."""
    peak = peak_tokens(lives, lag)
    i = data.draw(st.integers(0, len(lives) - 1))
    end, left, tokens = lives[i]
    assert peak_tokens([*lives[:i], *lives[i + 1 :]], lag) <= peak
    assert peak_tokens([*lives[:i], (data.draw(st.integers(left, end)), left, tokens), *lives[i + 1 :]], lag) <= peak
    assert peak_tokens(lives, data.draw(st.integers(0, lag))) <= peak


@given(lives=st.lists(LATE, max_size=8), lag=LAGS, data=st.data())
def test_the_order_does_not_matter(lives: list[Lifetime], lag: int, data: st.DataObject) -> None:
    assert peak_tokens(data.draw(st.permutations(lives)), lag) == peak_tokens(lives, lag)


def test_it_saves_what_the_sum_of_full_lengths_would_waste() -> None:
    """Ten requests that end ten steps apart: together they never hold the 550 tokens of their full lengths."""
    lives = [(10 * i, 10 * i, 1) for i in range(1, 11)]
    assert sum(left for _, left, _ in lives) == 550
    assert peak_tokens(lives) == 300  # in step 50 six are alive with 50 tokens each, in step 60 five with 60


@given(life=LATE, lag=LAGS)
def test_alone_a_sequence_takes_its_full_length_however_late(life: Lifetime, lag: int) -> None:
    _, left, tokens = life
    assert peak_tokens([life], lag) == tokens - 1 + left
    assert peak_tokens([]) == 0
