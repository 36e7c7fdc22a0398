"""What a policy is, and the two that look at nothing but the time of arrival.

A policy orders and drops waiting requests; it never admits, and knows neither pages nor arrays. The scheduler takes
requests in the policy's order and stops at the first that does not fit, so a policy's order is also its promise about
starvation.
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

        Called in each step in which requests may join and at least one waits.

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


class LCFS:
    """Last come, first served: under overload those few are served in time, instead of everybody too late.

    Starvation: by design. A request starts at the latest when nobody newer waits, so with an endless surplus of
    arrivals an old one never does.

    Why the newest (paper, Theorem B.1): let r(x) be the reward for a first token after x seconds, falling and concave.
    If l of the waiting requests can be served, at given times, nothing earns more than the l latest, in order of
    arrival: in any slot a later arrival earns more, and of two, the one that came first loses more by the later slot.
    With a reward cut off at zero it is false. With r(x) = max(0, 1 - (x / 6)^2), requests that came 5 s and 0 s ago and
    slots now and in 5 s, order of arrival earns 0.61 and the reverse 1, since it gives up a request that is lost
    anyway. So those past the limit must be dropped first, as EarlyAbort does.
    """

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """The newest first."""
        return Ordering(waiting[::-1])


class Rounds:
    """What became of the candidates of the last round: a policy is not told, but it can see who waits no more."""

    def __init__(self) -> None:
        self._offered: list[Sequence] = []

    def offer(self, candidates: Seq[Sequence]) -> None:
        """These are the candidates of this round."""
        self._offered = list(candidates)

    def started(self, waiting: Seq[Sequence]) -> list[Sequence]:
        """Those of the last round's candidates that have started since, whether or not they have ended."""
        still = {sequence.number for sequence in waiting}
        gone = [sequence for sequence in self._offered if sequence.number not in still]
        return [sequence for sequence in gone if sequence.slot is not None or sequence.first_token_at is not None]
