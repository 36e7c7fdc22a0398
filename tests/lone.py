"""A shard without the others: shard 0 of two, in an engine of its own, for tests where there is one GPU.

What the other shard would add is zeros. So the answers are nobody's, but they are the same on every backend, and all
that shard 0 does with two GPUs happens here: its part of the weights, its collectives, its branches and graphs.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from slora_ref.tp import Shard
from slora_ref.tp.communicator import Communicator


class LoneShard(Communicator):
    """Shard 0 of two; whatever is asked of the other has gone well there."""

    def __init__(self) -> None:
        super().__init__(Shard(0, 2))

    def reduce(self, x: np.ndarray) -> int:
        return int(x.nbytes)

    def gather(self, x: np.ndarray, gathered: np.ndarray) -> int:
        gathered[0], gathered[1] = x, 0
        return int(x.nbytes)

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        assert message is not None
        return message, len(message)

    def fail(self, reason: str) -> None:
        raise AssertionError(f"nobody is there to hear of it: {reason}")


def be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an engine of two shards is shard 0 alone; on a GPU, with NCCL among one."""
    monkeypatch.setattr("slora_ref.engine.group._communicator", lambda _: LoneShard())


def be_alone_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, and NCCL moves the arrays of steps, in a group of one."""
    be_alone(monkeypatch)
    module: Any = importlib.import_module("slora_ref.tp.nccl")

    class LoneNccl(module.NcclCommunicator):  # type: ignore[misc]
        """As if the other GPU sent zeros."""

        def __init__(self, host: Communicator) -> None:
            Communicator.__init__(self, host.shard)
            self.counts = host.counts
            self.counts.as_of_a_ring = True
            self._nccl = module.nccl.NcclCommunicator(1, module.nccl.get_unique_id(), 0)

        def gather(self, x: Any, gathered: Any) -> int:
            gathered[1:] = 0
            return int(super().gather(x, gathered[:1]))

    monkeypatch.setattr(module, "NcclCommunicator", LoneNccl)
    return LoneNccl
