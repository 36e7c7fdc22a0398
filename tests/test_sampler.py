"""Sampling against the definitions, a token at a time; and against transformers' warpers, where they are installed."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_ref.sampler import Sampling, filtered_probabilities, log_probabilities, noise, sample


def how(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    """The same parameters for all rows; seeds 0, 1, ..., position 7."""
    return Sampling(
        temperature=np.full(rows, temperature, np.float64),
        top_k=np.full(rows, top_k, np.int64),
        top_p=np.full(rows, top_p, np.float64),
        min_p=np.full(rows, min_p, np.float64),
        seeds=tuple(range(rows)),
        positions=(7,) * rows,
    )


def pick(sampling: Sampling, rows: list[int]) -> Sampling:
    """The parameters of some rows, in this order."""
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return Sampling(
        **{k: v[rows] if isinstance(v, np.ndarray) else tuple(v[i] for i in rows) for k, v in values.items()}
    )


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution of each row, normalised."""
    kept = filtered_probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return kept / kept.sum(axis=1, keepdims=True)


def by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """token -> probability: temperature, then top-k, then top-p, then min-p, each renormalised."""
    largest = max(map(float, logits))
    p = {token: math.exp((float(logit) - largest) / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(p, key=lambda token: (-p[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    if top_p < 1:
        total, kept, mass = math.fsum(p[token] for token in ranked), [], 0.0
        for token in ranked:
            if mass / total >= top_p:
                break
            kept.append(token)
            mass += p[token]
        ranked = kept
    ranked = [token for token in ranked if p[token] >= min_p * p[ranked[0]]]
    total = math.fsum(p[token] for token in ranked)
    return {token: p[token] / total for token in ranked}


def random_logits(seed: int, rows: int, vocab: int, size: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * size).astype(np.float32)


filters = {
    "temperature": st.sampled_from((0.05, 0.5, 1.0, 2.0, 50.0)),
    "top_k": st.integers(0, 25),
    "top_p": st.sampled_from((1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)),
    "min_p": st.sampled_from((0.0, 1e-6, 0.05, 0.5, 1.0)),
}


@given(seed=st.integers(0, 1000), vocab=st.integers(1, 40), **filters)
def test_the_filters_are_their_definitions(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed, 1, vocab)
    got = probabilities(logits, how(1, temperature, top_k, top_p, min_p))[0]
    want = by_definition(logits[0], temperature, top_k, top_p, min_p)
    assert np.flatnonzero(got).tolist() == sorted(token for token, p in want.items() if p > 0)
    assert got == pytest.approx([want.get(token, 0.0) for token in range(vocab)], rel=1e-9, abs=1e-300)


@given(data=st.data(), seed=st.integers(0, 1000))
def test_rows_with_different_parameters_do_not_mix(data: st.DataObject, seed: int) -> None:
    """Greedy, sampled and broken rows in one step: each row is what it is alone, in whatever company and order."""
    rows = data.draw(st.integers(1, 6))
    logits = random_logits(seed, rows, 30)
    each = [
        data.draw(st.fixed_dictionaries({**filters, "temperature": st.sampled_from((0.0, 0.7, 1.5))}))
        for _ in range(rows)
    ]
    sampling = replace(
        how(rows), **{name: np.array([row[name] for row in each]) for name in filters}, positions=tuple(range(rows))
    )
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, rows - 1)), 3] = data.draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    tokens, finite = sample(logits, sampling)
    order = data.draw(st.permutations(range(rows)))
    again, _ = sample(logits[order], pick(sampling, order))
    for row in range(rows):
        alone, alone_finite = sample(logits[row : row + 1], pick(sampling, [row]))
        assert finite[row] == alone_finite[0] == np.isfinite(logits[row]).all()
        if finite[row]:
            assert tokens[row] == alone[0] == again[order.index(row)]
            if each[row]["temperature"]:
                assert tokens[row] in by_definition(logits[row], **each[row])
            else:
                assert tokens[row] == logits[row].argmax()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.array([[1, 5, 2, 5], [7, 7, 7, 7], [-1, -2, -1, -3]], np.float32)
    assert sample(logits, how(3, temperature=0))[0].tolist() == [1, 0, 0]


def test_among_equals_top_k_keeps_exactly_k() -> None:
    logits = np.array([[0, 2, 2, 2, -5]], np.float32)
    assert np.flatnonzero(probabilities(logits, how(1, top_k=2))[0]).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, how(1, min_p=1.0))[0]).tolist() == [1, 2, 3]
    assert np.flatnonzero(probabilities(logits, how(1, top_p=0.5))[0]).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-30, 1e-3])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_a_temperature_near_zero_is_greedy(temperature: float, size: float) -> None:
    """The scaled logits overflow; their differences to the largest one must not become NaN."""
    logits = random_logits(0, 20, 97, size)
    tokens, finite = sample(logits, how(20, temperature))
    assert finite.all()
    assert (tokens == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("temperature", [1e10, 1e300])
def test_an_endless_temperature_is_uniform(temperature: float) -> None:
    assert probabilities(random_logits(0, 1, 50), how(1, temperature)) == pytest.approx(np.full((1, 50), 0.02))


def test_top_p_of_one_keeps_even_what_rounding_would_lose() -> None:
    logits = np.array([[0.0, -30.0, -60.0, -700.0]], np.float32)
    assert (probabilities(logits, how(1))[0] > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_flagged_and_harms_no_other(bad: float, temperature: float) -> None:
    """Silently, NaN logits are token 0, again and again."""
    logits = random_logits(0, 3, 20)
    want, _ = sample(logits, how(3, temperature))
    logits[1, 19] = bad
    tokens, finite = sample(logits, how(3, temperature))
    assert finite.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == want[[0, 2]].tolist()


def test_no_rows_are_no_tokens() -> None:
    tokens, finite = sample(np.zeros((0, 97), np.float32), how(0))
    assert tokens.shape == finite.shape == (0,)


# --- noise ---


def philox(counter: int, key: int) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011), one block."""
    mask, c, k = (1 << 64) - 1, [counter & ((1 << 64) - 1), counter >> 64, 0, 0], [key, 0]
    for _ in range(10):
        first, second = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(second >> 64) ^ c[1] ^ k[0], second & mask, (first >> 64) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_the_test_knows_philox() -> None:
    """Random123's published vector for counter 0 and key 0."""
    assert philox(0, 0) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
def test_noise_is_a_function_of_seed_and_position_alone(seed: int, position: int) -> None:
    """53 bits of one Philox block, so any backend can compute it, at any time, in any order."""
    assert noise(seed, position) == (philox(position + 1, seed)[0] >> 11) * 2.0**-53


def test_noise_is_uniform_and_positions_and_seeds_are_independent() -> None:
    count = 4000
    by_position = np.array([noise(3, position) for position in range(count)])
    by_seed = np.array([noise(seed, 3) for seed in range(count)])
    for values in (by_position, by_seed):
        distance = np.abs(np.sort(values) - np.arange(count) / count).max()
        assert distance < 1.95 / count**0.5  # Kolmogorov: exceeded once in a thousand times
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 4 / count**0.5


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_tokens_come_as_often_as_their_probability_says(top_k: int, top_p: float) -> None:
    count = 6000
    logits = np.repeat(random_logits(5, 1, 12, 1.0), count, axis=0)
    sampling = replace(how(count, 0.8, top_k, top_p), seeds=(11,) * count, positions=tuple(range(count)))
    tokens, _ = sample(logits, sampling)
    expected = probabilities(logits[:1], pick(sampling, [0]))[0] * count
    seen = np.bincount(tokens, minlength=12)
    assert (seen[expected == 0] == 0).all()
    kept = expected > 0
    chi_square, freedom = ((seen - expected)[kept] ** 2 / expected[kept]).sum(), int(kept.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    uniform = np.full(kept.sum(), count / kept.sum())  # the opposite: the test would notice another distribution
    assert ((seen[kept] - uniform) ** 2 / uniform).sum() > freedom + 10 * (2 * freedom) ** 0.5


# --- log-probabilities ---


@given(seed=st.integers(0, 1000), vocab=st.integers(1, 30), count=st.integers(0, 40), data=st.data())
def test_log_probabilities_are_of_the_token_and_the_likeliest(
    seed: int, vocab: int, count: int, data: st.DataObject
) -> None:
    logits, token = random_logits(seed, 1, vocab)[0], data.draw(st.integers(0, vocab - 1))
    got = log_probabilities(logits, token, count)
    total = math.log(math.fsum(math.exp(float(logit)) for logit in logits))
    assert got == pytest.approx({index: float(logits[index]) - total for index in got}, abs=1e-9)
    ranked = sorted(range(vocab), key=lambda index: -logits[index])[:count]
    assert list(got) == [token, *(index for index in ranked if index != token)]


def test_log_probabilities_of_huge_logits_are_finite() -> None:
    got = log_probabilities(np.array([3e38, -3e38, 3e38], np.float32), 1, 3)
    assert got[0] == got[2] == pytest.approx(-math.log(2))
    assert got[1] == pytest.approx(-6e38, rel=1e-6)


# --- transformers ---


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(20))
def test_the_filters_are_those_of_transformers(seed: int) -> None:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rng = np.random.default_rng(seed)
    logits = random_logits(seed, 4, 200)
    temperature, top_k = float(rng.uniform(0.3, 2)), int(rng.integers(1, 200))
    top_p, min_p = float(rng.uniform(0.1, 0.99)), float(rng.uniform(0, 0.3))
    scores = torch.tensor(logits, dtype=torch.float64)
    warpers = [
        TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)
    ]  # fmt: skip
    for warper in warpers:
        scores = warper(None, scores)
    want = torch.softmax(scores, dim=-1).numpy()
    got = probabilities(logits, how(4, temperature, top_k, top_p, min_p))
    assert (got > 0).tolist() == (want > 0).tolist()
    assert got == pytest.approx(want, rel=1e-9)
