"""StepCommunicator: collectives as work of a step, kept and repeated with its launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from slora_ref.ops.kernel_backend import KernelBackend
from slora_ref.ops.peer_arguments import Mailbox, peer_gather, peer_reduce
from slora_ref.ops.tape import Part
from slora_ref.shapes import Array, Shaped
from slora_ref.tp.communicator import Collective, Communicator, Purpose
from slora_ref.tp.split import all_reduce_elements

PARTS: dict[Purpose, Part] = {"base": "communication", "lora": "lora_communication"}


class StepCommunicator(Communicator):
    """A communicator for a model on kernels.

    Args:
        inner: moves the arrays of the device.
        ops: the backend, whose tape keeps the collectives and whose memory takes their results.
        mailbox: what moves small arrays instead, by kernels; None: nothing does.
    """

    def __init__(self, inner: Communicator, ops: KernelBackend, mailbox: Mailbox | None = None) -> None:
        super().__init__(inner.shard)
        self.counts, self._inner, self._ops, self._mailbox = inner.counts, inner, ops, mailbox

    def all_reduce(self, x: Shaped[Array, " *dims"], purpose: Purpose = "base") -> Shaped[Array, " *dims"]:
        """As Communicator's; each repetition adds up what x holds then."""
        if self.shard.count > 1 and x.size:
            if self._mailbox is not None and self._mailbox.takes(x):
                self._ops.run("peer_reduce", peer_reduce(x, self._mailbox), x.dtype, PARTS[purpose])
                self._note("all_reduce", all_reduce_elements(x.nbytes, self.shard.count), purpose)
            else:
                self._do("all_reduce", partial(self._inner.reduce, x), purpose)
        return x

    def all_gather(self, x: Shaped[Array, " *dims"], purpose: Purpose = "base") -> Shaped[Array, "shards ..."]:
        """As Communicator's; the result is good until the next gather of as many dimensions."""
        if self.shard.count == 1:
            return x[None]
        gathered = self._ops.empty(f"gathered_{x.ndim}", (self.shard.count, *x.shape), x.dtype)
        if x.size:
            if self._mailbox is not None and self._mailbox.takes(x):
                self._ops.run("peer_gather", peer_gather(gathered, x, self._mailbox), np.float32, PARTS[purpose])
                self._note("all_gather", x.nbytes * (self.shard.count - 1), purpose)
            else:
                self._do("all_gather", partial(self._inner.gather, x, gathered), purpose)
        return gathered

    def _note(self, collective: Collective, nbytes: int, purpose: Purpose) -> None:
        """Counts what a kernel sends as what a ring would, like NCCL's; and waits for its end, as `_do` does."""
        self._ops.settle()
        self._ops.note(lambda: self.counts.add(collective, nbytes, purpose))

    def _do(self, collective: Collective, move: Callable[[], int], purpose: Purpose) -> None:
        """Moves, and counts: a graph that repeats the move does not count.

        The first time (only that comes by here) the host waits for what is before and for the end. What is launched for
        the first time may have to be loaded by the driver, which waits for all that runs on the GPU, and CUDA's
        documentation warns of that: so nothing must run there that waits for another shard.
        """
        sent = 0

        def work() -> None:
            nonlocal sent
            sent = move()

        self._ops.settle()
        self._ops.do(PARTS[purpose], self._ops.from_here(work))
        self._ops.settle()
        self._ops.note(lambda: self.counts.add(collective, sent, purpose))

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        raise AssertionError("the inner communicator moves the arrays")

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        raise AssertionError("the inner communicator moves the arrays")

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        raise AssertionError("orders go through the inner communicator")

    def fail(self, reason: str) -> None:
        """Ends the group."""
        self._inner.fail(reason)
