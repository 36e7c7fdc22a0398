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
        """Decides which waiting request comes next. One that is neither a candidate nor dropped goes on waiting.

        Args:
            waiting: in order of arrival; a preempted sequence stands where it arrived.
            running: in order of admission.
            now: seconds on the engine's clock.
        """
        ...


class FCFS:
    """First come, first served: the paper's default.

    Starvation: none. A request is passed only while its adapter is on its way for the first time, and by requests of
    the base model while it waits for a slot of the adapter table; what it needs stays reserved meanwhile. So it starts
    at the latest when all requests before it have ended and its adapter is there; with `admission = "expected"`, where
    those that passed it may outgrow their forecast, when they have ended too.
    """

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """As they came."""
        return Ordering(waiting)
