"""Shards as processes with a GPU each: NCCL moves the arrays of steps, all or large ones.

It does so on the stream that is current, so that collectives are captured in a graph like any launch. Small arrays may
go another way (ops/cuda_peers.py); orders and what else lies in host memory go through a communicator of the host.

NVLink multicast stays as the environment has it; nothing here asks for it.
"""

from __future__ import annotations

import ast
from typing import Any

from cupy.cuda import get_current_stream, nccl

from slora_ref.shapes import Array, Shaped
from slora_ref.tp.communicator import Communicator
from slora_ref.tp.split import all_reduce_elements

KINDS = {"float32": nccl.NCCL_FLOAT32, "float16": nccl.NCCL_FLOAT16, "bfloat16": nccl.NCCL_BFLOAT16}


class NcclCommunicator(Communicator):
    """The shard whose GPU is the current one.

    Args:
        host: of the same shard; carries what lies in host memory.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.shard)
        self.counts, self._host = host.counts, host
        self.counts.as_of_a_ring = True
        unique = repr(nccl.get_unique_id()).encode() if self.shard.index == 0 else None
        name = ast.literal_eval(host.broadcast(unique).decode())  # bytes; in CuPy 13 a tuple of integers
        self._nccl = nccl.NcclCommunicator(self.shard.count, name, self.shard.index)
        host.on_loss.append(self._nccl.abort)

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        place, stream = _address(x), get_current_stream().ptr
        self._nccl.allReduce(place, place, x.size, KINDS[x.dtype.name], nccl.NCCL_SUM, stream)
        return all_reduce_elements(x.nbytes, self.shard.count)

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        stream = get_current_stream().ptr
        self._nccl.allGather(_address(x), _address(gathered), x.size, KINDS[x.dtype.name], stream)
        return int(x.nbytes) * (self.shard.count - 1)

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        raise AssertionError("orders go through the host's communicator")

    def fail(self, reason: str) -> None:
        """Ends the group."""
        self._host.fail(reason)


def _address(array: Any) -> int:
    assert hasattr(array.data, "ptr") and array.flags.c_contiguous, "NCCL moves contiguous arrays of a GPU"
    return int(array.data.ptr)
