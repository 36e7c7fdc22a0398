"""KernelStep: a step that a device is computing. It knows where its samples arrive, and no launches."""

from __future__ import annotations

import numpy as np

from slora_ref.executor.result import StepResult
from slora_ref.ops.ticket import Ticket
from slora_ref.shapes import Array, Float, Int


class KernelStep:
    """A step that has been started.

    Args:
        sampled: see Batch.
        host: [2, most] receives the tokens sampled from each logits, and whether those are finite.
        begun, ended: passed when the step's own numbers have come to the device, and when `host` has its.
        logits: of StepResult.
    """

    def __init__(
        self,
        sampled: Int[Array, " samples"],
        host: Int[Array, "two most"],
        begun: Ticket,
        ended: Ticket,
        logits: Float[Array, "logits vocab"] | None,
    ) -> None:
        self._sampled, self._host, self._begun, self._ended, self._logits = sampled, host, begun, ended, logits

    def read(self) -> StepResult:
        """Waits for the device: the one place in a step where the host does."""
        self._ended.wait()
        tokens, finite = self._host[:, self._sampled]
        return StepResult(tokens.astype(np.int64), finite.astype(np.bool_), self._logits)

    def seconds(self) -> float:
        """How long the device took; waits for it."""
        self._ended.wait()
        return self._ended.seconds_since(self._begun)
