"""Which waiting request next. A policy orders and drops waiting requests; it never admits, and knows neither pages nor
arrays.

The scheduler takes requests in the policy's order and stops at the first that does not fit, so a policy's order is also
its promise about starvation.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from slora_ref.request import Sequence


@dataclass(frozen=True)
class Ordering:
    """What a policy answers.

    Args:
        candidates: waiting sequences, the next one first.
        dropped: waiting sequences that are to be aborted now.
    """

    candidates: Seq[Sequence]
    dropped: Seq[Sequence] = ()


class Policy(Protocol):
    """Orders the waiting requests."""

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Decides which waiting request comes next.

        Args:
            waiting: in order of arrival; a preempted sequence stands where it arrived.
            running: in order of admission.
            now: seconds on the engine's clock.
        """
        ...


class FCFS:
    """First come, first served: the paper's default.

    Starvation: none. Nothing is admitted before an earlier request but while that one's adapter is on its way, and then
    its pages stay reserved. So a request starts at the latest when all requests before it have ended.
    """

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """As they came."""
        return Ordering(waiting)
