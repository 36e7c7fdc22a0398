"""Sampling: from logits to tokens, every request with its own parameters.

The noise of a token is a function of the request's seed and the token's position alone (Philox, Salmon et al. 2011), so
batch, preemption and chunking never change what is drawn. Filters are applied in transformers' order: temperature,
top-k, top-p, min-p. It knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.shapes import Array, Bool, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How each token of a step is chosen, one entry a sampled row; the meanings are those of SamplingParams.

    Args:
        temperature, top_k, top_p, min_p: [samples].
        seeds, positions: [samples] what the noise depends on.
    """

    temperature: Float[Array, " samples"]
    top_k: Int[Array, " samples"]
    top_p: Float[Array, " samples"]
    min_p: Float[Array, " samples"]
    seeds: tuple[int, ...]
    positions: tuple[int, ...]


def likeliest(samples: int) -> Sampling:
    """So many rows, none of them drawn."""
    zeros = np.zeros(samples)
    return Sampling(zeros, np.zeros(samples, np.int64), zeros + 1, zeros, (0,) * samples, (0,) * samples)


def sample(
    logits: Float[Array, "samples vocab"], how: Sampling
) -> tuple[Int[Array, " samples"], Bool[Array, " samples"]]:
    """Chooses a token a row.

    Returns:
        [samples] tokens; and [samples] whether the row's logits are all finite: where not, the token means nothing.
    """
    finite: Bool[Array, " samples"] = np.logical_and.reduce(np.isfinite(logits), axis=1)
    tokens = np.zeros(len(logits), np.int64)
    greedy = finite & (how.temperature == 0)
    tokens[greedy] = logits[greedy].argmax(axis=1)
    drawn = np.flatnonzero(finite & (how.temperature > 0))
    if len(drawn):
        probabilities = filtered_probabilities(
            logits[drawn], how.temperature[drawn], how.top_k[drawn], how.top_p[drawn], how.min_p[drawn]
        )
        tokens[drawn] = _draw(probabilities, np.array([noise(how.seeds[i], how.positions[i]) for i in drawn.tolist()]))
    return tokens, finite


def filtered_probabilities(
    logits: Float[Array, "samples vocab"],
    temperature: Float[Array, " samples"],
    top_k: Int[Array, " samples"],
    top_p: Float[Array, " samples"],
    min_p: Float[Array, " samples"],
) -> Float[Array, "samples vocab"]:
    """The distribution that each row is drawn from: float64, 0 for the tokens filtered out, not normalised.

    The likeliest token always stays.
    """
    below = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # at a temperature near 0 all but the likeliest fall to exp(-inf) = 0
        scaled = below / temperature[:, None]
    order = np.argsort(-scaled, axis=1, kind="stable")
    p = np.exp(np.take_along_axis(scaled, order, axis=1))
    places = np.arange(logits.shape[1])
    p[(places >= top_k[:, None]) & (top_k[:, None] > 0)] = 0
    before = np.cumsum(p, axis=1) - p
    enough = before >= top_p[:, None] * p.sum(axis=1, keepdims=True)  # without this token
    p[enough & (top_p[:, None] < 1)] = 0
    p[p < min_p[:, None] * p[:, :1]] = 0
    unordered = np.empty_like(p)
    np.put_along_axis(unordered, order, p, axis=1)
    return unordered


def noise(seed: int, position: int) -> float:
    """A number in [0, 1) for one position of one request: the first of the Philox stream at that counter."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(weights: Float[Array, "samples vocab"], noise: Float[Array, " samples"]) -> Int[Array, " samples"]:
    """The token at which the running sum of weights passes noise x total, in order of token ids."""
    sums = np.cumsum(weights, axis=1)
    passed = (sums > noise[:, None] * sums[:, -1:]) & (weights > 0)
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    tokens: Int[Array, " samples"] = np.where(passed.any(axis=1), passed.argmax(axis=1), last)
    return tokens


def log_probabilities(logits: Float[Array, " vocab"], token: int, count: int) -> dict[int, float]:
    """The log-probabilities of `token` and of the `count` likeliest, before temperature and filters (as in vLLM)."""
    shifted = logits.astype(np.float64) - logits.max()
    log_p = shifted - np.log(np.exp(shifted).sum())
    likeliest = np.argsort(-log_p, kind="stable")[:count].tolist()
    return {index: float(log_p[index]) for index in dict.fromkeys([token, *likeliest])}
