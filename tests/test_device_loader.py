"""DeviceLoader: what happens to a load that cannot be started, or is interrupted; and the memory that it reads."""

from __future__ import annotations

import importlib
import mmap

import pytest
from fake_gpu import install
from serving import assert_all_free, assert_right, host_kernels, new_engine, run_to_end

from slora_ref import FinishReason, SamplingParams
from slora_ref.errors import KernelError

PROMPT, PARAMS = [3, 4, 5, 6], SamplingParams(max_tokens=3, ignore_eos=True)


def refuse(*_: object) -> None:
    raise KernelError("no copy today")


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("loading", ["inline", "background"])
def test_a_load_that_cannot_be_started_fails_its_own_requests(loading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine({"x": "x"}, on="host", loading=loading)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.ops, "prepared_load", refuse)
        bad, good = (engine.add_request(PROMPT, PARAMS, name) for name in ("x", None))
        done = run_to_end(engine)
    assert done[bad].finish_reason is FinishReason.ERROR and "no copy today" in done[bad].error
    assert_right(done[good], None, PARAMS)
    assert_right(engine.generate([PROMPT], PARAMS, "x")[0], "x", PARAMS)
    assert_all_free(engine)


def test_an_interrupt_while_a_load_is_awaited_leaves_no_load_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine({"x": "x"}, on="host", loading="inline")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("slora_ref.ops.host_ops.Done.wait", interrupt)
        engine.generate([PROMPT], PARAMS, "x")
    engine.check()
    assert_right(engine.generate([PROMPT], PARAMS, "x")[0], "x", PARAMS)
    assert_all_free(engine)


class WithoutLargePages(mmap.mmap):
    """As on a system that has none: the advice is refused."""

    def madvise(self, *_: int) -> None:
        raise OSError(22, "Invalid argument")


def test_pinned_memory_needs_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 0, host_kernels())
    memory = importlib.import_module("slora_ref.ops.cuda_memory")
    monkeypatch.setattr("mmap.mmap", WithoutLargePages)
    pinned = memory.pinned_bytes(1 << 16)
    assert pinned.nbytes == 1 << 16 and not pinned.any()
