"""Early abort (paper section 4.3): drop who would get the first token too late anyway, and serve the newest first
while more arrive than can be served.

Both readings are here: the paper's text, with an estimate of the prefill latency that is learnt while running, and the
authors' code, with its constants and its rounding. Neither knows what a request costs in pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from slora_ref.policy.base import Ordering, Rounds
from slora_ref.request import Sequence

LIMIT_SECONDS = 6.0
"""The paper's limit on the first token (section 7.1)."""


class EarlyAbort:
    """The paper's rule. A request is dropped when `now + prefill` is past its limit. R1, arrivals in a round, and R2,
    requests that started in a round, are moving averages; with R1 > R2 the newest come first, else the oldest.

    The prefill estimate is the fastest of the last `memory` prefills, so nobody is dropped who could still be in time
    if as quick as the quickest of late. A request that has had its first token (and was preempted) is never dropped.

    Starvation: none. Every request starts, or is dropped once it has waited for `limit` seconds.

    Args:
        limit: seconds from arrival to first token.
        weight: of the newest round in the moving averages.
        memory: how many prefills the estimate looks back.
    """

    def __init__(self, limit: float = LIMIT_SECONDS, weight: float = 0.7, memory: int = 64) -> None:
        self.limit, self.weight = limit, weight
        self._arrivals = self._starts = 0.0  # R1, R2
        self._last_number = -1
        self._rounds = Rounds()
        self._offered_at = 0.0
        self._started: list[tuple[Sequence, float]] = []  # those whose first token is still to come, and since when
        self._prefills: deque[float] = deque(maxlen=memory)

    @property
    def prefill_seconds(self) -> float:
        """The estimate: from a request's start to its first token. 0 before anything has been seen."""
        return min(self._prefills, default=0.0)

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Drops the hopeless, then the newest or the oldest first."""
        started = self._rounds.started(waiting)
        self._learn(started)
        arrived = sum(sequence.number > self._last_number for sequence in waiting)
        self._last_number = max(self._last_number, waiting[-1].number)
        self._arrivals += self.weight * (arrived - self._arrivals)
        self._starts += self.weight * (len(started) - self._starts)
        latest = now + self.prefill_seconds - self.limit
        dropped = [s for s in waiting if s.request.arrival < latest and s.first_token_at is None]
        gone = {sequence.number for sequence in dropped}
        kept = [sequence for sequence in waiting if sequence.number not in gone]
        candidates = kept[::-1] if self._arrivals > self._starts else kept
        self._rounds.offer(candidates)
        self._offered_at = now
        return Ordering(candidates, dropped)

    def _learn(self, started: list[Sequence]) -> None:
        """Takes in the prefills that have ended since the last round."""
        self._started += [(sequence, self._offered_at) for sequence in started if not sequence.preemptions]
        going = []
        for sequence, since in self._started:
            if sequence.first_token_at is not None:
                self._prefills.append(sequence.first_token_at - since)
            elif not sequence.finished:
                going.append((sequence, since))
        self._started = going


class OriginalEarlyAbort:
    """The authors' rule. 0.5 s stand for the prefill, both averages are cut to whole numbers, R1 counts the growth of
    the queue since the last round in which anybody started (again in every round in which nobody does), and at a draw
    the newest come first.

    Starvation: none, as for EarlyAbort.
    """

    PREFILL_SECONDS = 0.5

    def __init__(self, limit: float = LIMIT_SECONDS) -> None:
        self.limit = limit
        self._arrivals = self._starts = 1  # R1, R2
        self._left_waiting = 0  # after the last round in which anybody started
        self._rounds, self._offered = Rounds(), 0

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Drops the hopeless, then the newest or the oldest first."""
        started = len(self._rounds.started(waiting))
        if started:
            self._starts = max(int(0.7 * started + 0.3 * self._starts), 1)
            self._left_waiting = self._offered - started
        self._arrivals = int(0.7 * (len(waiting) - self._left_waiting) + 0.3 * self._arrivals)
        latest = now + self.PREFILL_SECONDS - self.limit
        dropped = [s for s in waiting if s.request.arrival <= latest and s.first_token_at is None]
        gone = {sequence.number for sequence in dropped}
        kept = [sequence for sequence in waiting if sequence.number not in gone]
        candidates = kept[::-1] if self._arrivals >= self._starts else kept
        self._rounds.offer(candidates)
        self._offered = len(candidates)
        return Ordering(candidates, dropped)
