"""Shards as MPI processes, on one host or many: `mpirun -n 4 python -m slora_ref demo --communicator mpi`.

MPI's own collectives, started and then asked for, so that a process that waits gives its core away: there may be more
shards than cores. A process that is killed is noticed by mpirun, which ends the others; one that fails aborts them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import Any

import numpy as np

from slora_ref.errors import ConfigError, how_to_install
from slora_ref.shapes import Array, Shaped
from slora_ref.tp.communicator import Communicator
from slora_ref.tp.shard import Shard
from slora_ref.tp.split import all_reduce_elements

EAGER, NAP_S = 100, 50e-6  # so many times a waiting process only gives way, then it sleeps between two looks


class MpiCommunicator(Communicator):
    """The shard that this process is: its rank in MPI's world.

    Raises:
        ConfigError: mpi4py, or the MPI that it needs, is not installed.
    """

    def __init__(self) -> None:
        self._mpi = _import_mpi()
        self._world = self._mpi.COMM_WORLD
        super().__init__(Shard(self._world.Get_rank(), self._world.Get_size()))
        self.counts.as_of_a_ring = True

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        self._wait(self._world.Iallreduce(self._mpi.IN_PLACE, x))
        return all_reduce_elements(x.nbytes, self.shard.count)

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        self._wait(self._world.Iallgather(np.ascontiguousarray(x), gathered))
        return int(x.nbytes) * (self.shard.count - 1)

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        size = np.array([len(message or b"")], np.int64)
        self._wait(self._world.Ibcast(size))
        data = np.empty(int(size[0]), np.uint8) if message is None else np.frombuffer(message, np.uint8).copy()
        self._wait(self._world.Ibcast(data))
        last = self.shard.index == self.shard.count - 1
        return data.tobytes(), 0 if last else size.nbytes + data.nbytes

    def _wait(self, request: Any) -> None:
        looks = 0
        while not request.Test():
            looks += 1
            if looks < EAGER:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

    def fail(self, reason: str) -> None:
        """Says why, and ends all processes with exit code 1; it does not return."""
        print(f"slora-ref: error: {reason}", file=sys.stderr, flush=True)
        self._world.Abort(1)


def _import_mpi() -> Any:
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"communicator mpi needs mpi4py and an MPI: {how_to_install('mpi')}")
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"mpi4py finds no MPI: {error}; one comes with {how_to_install('mpi')}") from None
