"""What waits for what on a GPU, on one that is none: an engine's answers do not depend on how its streams overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_gpu import install
from lone import be_alone, be_alone_on_a_gpu
from serving import host_kernels, new_engine, run_to_end, without_shape_checks
from test_branch import ASKS, NAMES, PARAMS

from slora_ref import Engine

EACH = {name: name for name in NAMES}


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    with without_shape_checks():
        yield


def answers(engine: Engine) -> list[np.ndarray]:
    """The logits of each request, twice: recorded, and repeated."""
    found = []
    for _ in range(2):
        numbers = [engine.add_request(prompt, PARAMS, name) for name, prompt in ASKS]
        done = run_to_end(engine)
        assert not [done[n].error for n in numbers if done[n].error]
        found += [np.array(done[n].logits) for n in numbers]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eager", [True, False])
def test_a_shards_streams_may_overlap_as_they_will(eager: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    be_alone(monkeypatch)
    want = answers(new_engine(EACH, shards=2))
    install(monkeypatch, seed, host_kernels())
    be_alone_on_a_gpu(monkeypatch)
    got = answers(new_engine(EACH, on="cuda", shards=2, enforce_eager=eager))
    for ours, theirs in zip(got, want, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
