"""Small arrays that kernels exchange in place of NCCL: who can, what goes this way, and that the answers are the same.

The kernels themselves are tested with the others: tests/kernel_cases.py.
"""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
from fake_gpu import install
from lone import be_alone
from serving import host_kernels, without_shape_checks
from test_branch import answers, engine_on, parts_of_a_step

from slora_ref.engine.devices import KernelDevice
from slora_ref.ops.collectives import StepCommunicator
from slora_ref.ops.host_ops import HostOps
from slora_ref.ops.peer_arguments import BLOCKS, CHUNK, CHUNKS, Mailbox, memory_bytes
from slora_ref.tp import Shard
from slora_ref.tp.communicator import Communicator
from slora_ref.tp.threads import thread_communicators

FEW, FAR_AHEAD = 4, 1 << 30  # blocks; turns


def lone_mailbox(shard: Shard) -> Mailbox:
    """Of a shard whose only other has put zeros for all turns to come."""
    words = memory_bytes(shard.count, FEW) // 4
    memory = np.zeros((2, words), np.int32)
    memory[0, -(-shard.count * FEW // 4) * 4 :] = FAR_AHEAD
    memory[0, : shard.count * 2 * FEW * CHUNKS * 4] = 0
    offsets = np.array([0, memory.strides[0]], np.int64)
    return Mailbox(shard, memory.reshape(-1), offsets, np.zeros(FEW, np.int32), np.zeros(1, np.int32))


def test_messages_by_kernels_give_the_answers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 of two, without the other: its parts of a step, what it counts, and its logits."""
    be_alone(monkeypatch)
    plain = engine_on(HostOps, monkeypatch, overlap=False)
    want = answers(plain)
    boxes: list[Mailbox] = []

    def with_mailbox(device: KernelDevice, inner: Communicator) -> Communicator:
        boxes.append(lone_mailbox(inner.shard))
        return StepCommunicator(inner, device._ops, boxes[0])

    monkeypatch.setattr(KernelDevice, "communicator", with_mailbox)
    engine = engine_on(HostOps, monkeypatch, overlap=False)
    for (tokens, logits), (want_tokens, want_logits) in zip(answers(engine), want, strict=True):
        assert tokens == want_tokens
        assert (np.frombuffer(logits, np.float32) == np.frombuffer(want_logits, np.float32)).all()
    assert parts_of_a_step(engine) == parts_of_a_step(plain)
    assert engine.executor.counts.calls == plain.executor.counts.calls
    assert engine.executor.counts.lora_nbytes > 0 < boxes[0].turns[0]


def test_what_is_large_or_no_whole_chunk_goes_another_way() -> None:
    box = lone_mailbox(Shard(0, 2))
    most = FEW * CHUNKS * CHUNK
    assert [box.takes(np.zeros(size, np.uint8)) for size in (0, 8, 16, most, most + 16)] == [0, 0, 1, 1, 0]
    three = Mailbox(Shard(0, 3), box.memory, box.offsets, box.turns, box.stop)
    assert three.takes(np.zeros(most // 2, np.uint8)) and not three.takes(np.zeros(most, np.uint8))
    assert BLOCKS * CHUNKS * CHUNK == 8 << 20


def opened(monkeypatch: pytest.MonkeyPatch, shards: int) -> tuple[list[Any], list[Communicator]]:
    """What each shard of a group gets, on a GPU that is none."""
    with without_shape_checks():
        install(monkeypatch, 0, host_kernels())
        open_mailbox = importlib.import_module("slora_ref.ops.cuda_peers").open_mailbox
        group = thread_communicators(shards)
        with ThreadPoolExecutor(shards) as threads:
            return list(threads.map(open_mailbox, group)), list(group)


def test_each_shard_knows_where_the_others_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, group = opened(monkeypatch, 3)
    addresses = [box.memory.ctypes.data for box in boxes]
    for box, own, communicator in zip(boxes, addresses, group, strict=True):
        box.memory.gpu.current.synchronize()
        assert (np.asarray(box.offsets) + own).tolist() == addresses
        assert not box.stop[0]
        for lost in communicator.on_loss:
            lost()
        assert box.stop[0], "or a kernel would wait for a shard that is dead"


def test_hosts_of_their_own_have_no_mailboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = count()
    monkeypatch.setattr("socket.gethostname", lambda: f"host {next(names)}")
    assert opened(monkeypatch, 2)[0] == [None, None]


def test_kernels_wait_no_longer_when_nccl_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """To abort it may take the end of what runs on the GPU."""
    install(monkeypatch, 0, host_kernels())
    open_mailbox = importlib.import_module("slora_ref.ops.cuda_peers").open_mailbox
    group = thread_communicators(2)
    stopped: list[int] = []
    group[0].on_loss.append(lambda: stopped.append(int(boxes[0].stop[0])))  # as NcclCommunicator, which is made first
    with without_shape_checks(), ThreadPoolExecutor(2) as threads:
        boxes = list(threads.map(open_mailbox, group))
    for lost in group[0].on_loss:
        lost()
    assert stopped == [1]


@pytest.mark.parametrize("refused", ["malloc", "ipcGetMemHandle", "ipcOpenMemHandle"])
def test_memory_that_one_cannot_share_is_used_by_none(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 0, host_kernels())
    runtime, tried = importlib.import_module("slora_ref.ops.cuda_peers").runtime, count()
    before = getattr(runtime, refused)

    def fails_once(*arguments: Any) -> Any:
        if next(tried) == 0:
            raise runtime.CUDARuntimeError("the operation is not supported")
        return before(*arguments)

    monkeypatch.setattr(runtime, refused, fails_once)
    with without_shape_checks(), ThreadPoolExecutor(2) as threads:
        open_mailbox = importlib.import_module("slora_ref.ops.cuda_peers").open_mailbox
        assert list(threads.map(open_mailbox, thread_communicators(2))) == [None, None]
