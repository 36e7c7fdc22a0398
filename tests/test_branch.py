"""LoRA's first product and its message run beside the base model's product: order, independence, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from lone import be_alone
from serving import CONFIG, new_engine, run_to_end
from test_shards import PARAMS, OneAtATime

from slora_ref import Engine, EngineConfig
from slora_ref.engine.devices import KernelDevice
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.tape import Part, Tape, Work
from slora_ref.tp import Shard

ASKS = [("x", [5, 6, 7]), ("z", [*range(20)]), (None, [9]), ("layers", [1, 2]), ("o", [3]), ("qv", [4] * 9)]
NAMES = dict.fromkeys(name for name, _ in ASKS if name)


class FixedMemory(HostOps):
    """The same memory for the same result, as on a GPU. A branch is done as early as it may be."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.memory: dict[tuple[str, str], np.ndarray] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: object) -> np.ndarray:
        key, size = (name, np.dtype(dtype).name), math.prod(shape)
        if key not in self.memory or self.memory[key].size < size:
            self.memory[key] = super().empty(name, (size,), dtype)
        return self.memory[key][:size].reshape(shape)


class LateBranch(FixedMemory):
    """Does the work of a branch as late as it may be done: when something waits for it."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.within, self.late = False, []

    @contextmanager
    def in_branch(self) -> Iterator[None]:
        self.within = True
        yield
        self.within = False

    def from_here(self, work: Work) -> Work:
        return self._later(work) if self.within else work

    def prepare(self, launch: object) -> Work:
        work = super().prepare(launch)
        return self._later(work) if self.within else work

    def _later(self, work: Work) -> Work:
        return lambda: self.late.append(work)

    def end_branch(self) -> None:
        late, self.late = self.late, []
        for work in late:
            work()


def engine_on(
    backend: type[HostOps], monkeypatch: pytest.MonkeyPatch, shards: int = 2, overlap: bool = True
) -> Engine:
    """An engine with every adapter, whose shards compute by kernels on this backend."""

    def on_kernels(config: EngineConfig, _: Shard) -> KernelDevice:
        return KernelDevice(config, backend(np.float32, kernels=OneAtATime(), shards=config.shards, overlap=overlap))

    for module in ("build", "follower"):
        monkeypatch.setattr(f"slora_ref.engine.{module}.open_device", on_kernels)
    return new_engine({name: name for name in NAMES}, shards=shards)


def answers(engine: Engine) -> list[tuple[list[int], bytes]]:
    """Tokens and the bits of the logits of each request."""
    numbers = [engine.add_request(prompt, PARAMS, name) for name, prompt in ASKS]
    done = run_to_end(engine)
    return [(list(done[n].token_ids), np.array(done[n].logits).tobytes()) for n in numbers]


def test_a_branch_may_come_before_or_after_what_it_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits: neither reads what the other writes, nor writes where it does; kept and captured steps, too."""
    early, late = (answers(engine_on(backend, monkeypatch)) for backend in (FixedMemory, LateBranch))
    assert early == late
    monkeypatch.undo()
    whole = answers(new_engine({name: name for name in NAMES}))
    assert [tokens for tokens, _ in early] == [tokens for tokens, _ in whole]


def test_work_that_waits_for_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without a join the adapters' part is missing."""
    late = answers(engine_on(LateBranch, monkeypatch))
    monkeypatch.setattr(LateBranch, "end_branch", lambda self: self.late.clear())
    assert answers(engine_on(LateBranch, monkeypatch)) != late


def parts_of_a_step(engine: Engine) -> list[Part]:
    executor = getattr(engine.executor, "_executor", engine.executor)
    return [part for tape in executor.last for part, _ in tape.work]


def test_the_messages_of_lora_are_beside_the_base_models_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer: shrink and message of q, k, v in a branch, then their base product, and the branch ends; the same
    for o, gate and up, and down. The base model's own messages are in no branch."""
    be_alone(monkeypatch)
    engine = engine_on(HostOps, monkeypatch)
    answers(engine)
    engine.add_request([1, 2, 3], PARAMS, "x")
    engine.step()
    found = " ".join(parts_of_a_step(engine))
    for part in ("rest", "attention"):
        found = found.replace(f"{part} ", "")
    gathered = "branch lora lora_communication lora gemm branch lora "
    reduced = "branch lora lora_communication gemm branch lora communication "
    assert f"communication {(gathered + reduced) * 2 * CONFIG.num_layers}" in found


def test_a_branch_in_which_nothing_is_done_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No adapter changes anything but q and v: then o, gate, up and down have no branches."""
    be_alone(monkeypatch)
    engine = engine_on(HostOps, monkeypatch)
    for name in [*NAMES][1:]:
        engine.remove_adapter(name)
    engine.remove_adapter("x")
    engine.add_request([1, 2, 3], PARAMS)
    engine.step()
    assert "branch" not in parts_of_a_step(engine)
    ops = HostOps()
    with ops.recording() as tape:
        with ops.branch():
            pass
        ops.join()
    assert not tape.work


def test_without_overlap_messages_are_behind_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """And right before what reads both; no branch, behind which nothing may start early. The same bits."""
    beside = answers(engine_on(FixedMemory, monkeypatch))
    assert answers(engine_on(FixedMemory, monkeypatch, overlap=False)) == beside
    be_alone(monkeypatch)
    engine = engine_on(HostOps, monkeypatch, overlap=False)
    answers(engine)
    found = " ".join(parts_of_a_step(engine))
    for part in ("rest", "attention"):
        found = found.replace(f"{part} ", "")
    layer = "gemm lora lora_communication lora lora gemm lora lora_communication lora communication "
    assert f"communication {layer * 2 * CONFIG.num_layers}" in found


def test_one_shard_has_no_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(HostOps, monkeypatch, shards=1)
    answers(engine)
    assert "branch" not in parts_of_a_step(engine)


def test_what_a_graph_does_is_noted_each_time() -> None:
    """A graph repeats the work by itself; a capture is none."""
    log: list[str] = []
    tape = Tape([("rest", lambda: log.append("work"))], [lambda: log.append("note")])
    tape.start()
    tape.note()
    tape.then(tape).replay()
    assert log == ["work", "note", "work", "work", "note", "note"]
    ops = HostOps()
    with ops.recording() as recorded:
        ops.do("rest", lambda: log.append("more"))
        ops.note(lambda: log.append("noted"))
    recorded.replay()
    assert log[6:] == ["more", "noted"] * 2


def test_parts_of_a_tape_keep_their_branches() -> None:
    log: list[str] = []
    parts: tuple[Part, ...] = ("rest", "branch", "lora", "gemm", "branch", "lora")
    tape = Tape([(part, lambda n=n: log.append(str(n))) for n, part in enumerate(parts)])
    tape.only("lora").replay()
    assert log == ["1", "2", "4", "5"], "or a branch would be captured that never joins"
    assert not tape.only("attention").work, "nothing but branches is nothing"
