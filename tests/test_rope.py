"""The RoPE tables against the published formulas, not against another implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from golden.cases import FOLDER, ROPES
from tiny import tiny_config

from slora_ref.config import RopeConfig
from slora_ref.rope import inverse_frequencies, rope_table

POSITIONS = (0, 1, 63, 64, 200)
KINDS = [
    RopeConfig("default", 5e5),
    RopeConfig("linear", 5e5, 4.0),
    RopeConfig("llama3", 5e5, 8.0, 8192),
    RopeConfig("yarn", 1e4, 4.0, 64),
]


def frequencies(rope: RopeConfig, head_dim: int = 16) -> np.ndarray:
    """inv_freq of T0 with this rope."""
    return inverse_frequencies(tiny_config(rope=rope, head_dim=head_dim))[0]


@pytest.mark.parametrize(
    ("rope", "factors"),
    [
        (RopeConfig("llama3", 5e5, 8.0, 8192), [1, 1, 1, 1, 0.371122, 0.125, 0.125, 0.125]),
        (RopeConfig("llama3", 1e4, 8.0, 64), [1, 0.772812, 0.130423, 0.125, 0.125, 0.125, 0.125, 0.125]),
        (RopeConfig("linear", 5e5, 4.0), [0.25] * 8),
        (RopeConfig("default", 5e5), [1.0] * 8),
    ],
)
def test_scaled_frequencies_are_the_published_multiples(rope: RopeConfig, factors: list[float]) -> None:
    plain = [rope.theta ** (-2 * i / 16) for i in range(8)]
    np.testing.assert_allclose(frequencies(rope) / plain, factors, atol=1e-6)


def test_yarn_is_the_published_ramp_and_temperature() -> None:
    values, scale = inverse_frequencies(tiny_config(rope=RopeConfig("yarn", 1e4, 4.0, 64)))
    wanted = [1, 0.237171, 0.05, 7.90569e-3, 2.5e-3, 7.90569e-4, 2.5e-4, 7.90569e-5]
    np.testing.assert_allclose(values, wanted, rtol=3e-6)
    assert scale == pytest.approx(1.138629, rel=1e-6)


def test_yarn_temperature_can_be_given_or_a_ratio() -> None:
    given = RopeConfig("yarn", 1e4, 4.0, 64, attention_factor=0.5)
    assert inverse_frequencies(tiny_config(rope=given))[1] == 0.5
    ratio = RopeConfig("yarn", 1e4, 4.0, 64, mscale=1.0, mscale_all_dim=0.5)
    wanted = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert inverse_frequencies(tiny_config(rope=ratio))[1] == pytest.approx(wanted)
    assert inverse_frequencies(tiny_config(rope=RopeConfig("yarn", 1e4, 1.0, 64)))[1] == 1.0


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_rounded_as_in_transformers(name: str) -> None:
    """The last bit of inv_freq, times 6,000 positions, is 2e-4 of the largest logit. torch's power is right to one bit
    alone, so few of ours may differ, and by that bit."""
    head_dim, rope = ROPES[name]
    ours, theirs = frequencies(rope, head_dim), np.load(FOLDER / "rope.npz")[name]
    assert ours.dtype == np.float32
    assert (ours != theirs).sum() <= (2 if rope.kind in ("default", "linear") else 0.2 * len(ours))  # or in the ramp
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=2)
    rounded_once = (rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    assert rope.kind != "default" or (rounded_once != theirs).sum() > 2, "this case cannot tell the two apart"


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope.kind)
@pytest.mark.parametrize("position", POSITIONS)
def test_table_is_cosine_and_sine_of_position_times_frequency(rope: RopeConfig, position: int) -> None:
    config = tiny_config(rope=rope)
    values, scale = inverse_frequencies(config)
    cos, sin = rope_table(config, 201)
    assert cos.shape == sin.shape == (201, 8) and cos.dtype == sin.dtype == np.float32
    angles = position * values.astype(np.float64)
    np.testing.assert_allclose(cos[position], scale * np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(sin[position], scale * np.sin(angles), atol=3e-5)


@pytest.mark.parametrize("rope", KINDS[1:], ids=lambda rope: rope.kind)
def test_an_ignored_scaling_would_show(rope: RopeConfig) -> None:
    """The error of ignoring it is 0 at position 0 and grows: short prompts alone would not show it."""
    plain = rope_table(tiny_config(rope=RopeConfig("default", rope.theta)), 201)[1]
    scaled = rope_table(tiny_config(rope=rope), 201)[1]
    assert abs(plain - scaled)[0].max() == 0 and abs(plain - scaled)[200].max() > 0.1


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope.kind)
def test_a_longer_table_begins_with_the_shorter(rope: RopeConfig) -> None:
    """Keys in the cache stay right as a text grows."""
    config = tiny_config(rope=rope)
    for short, long in zip(rope_table(config, 64), rope_table(config, 500), strict=True):
        assert np.array_equal(short, long[:64])


def test_frequencies_follow_head_dim() -> None:
    assert frequencies(RopeConfig(), head_dim=32).shape == (16,)
    assert rope_table(tiny_config(), 0)[0].shape == (0, 8)
