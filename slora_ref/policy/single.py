"""One adapter at a time: what serving with PEFT, or with weights that an adapter is merged into, must do."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slora_ref.policy.base import Ordering
from slora_ref.request import Sequence


class OneAdapter:
    """Requests of the running adapter may join; those of others wait until nothing runs. The base model counts as one.

    Starvation: bounded. Requests of the running adapter may pass at most `most_passed` waiting ones of others; so a
    request starts at the latest when all before it have ended, and those of running adapters that passed them.

    Args:
        most_passed: waiting requests of other adapters that may be passed; 30 is the authors'.
        joining: whether requests may join a running batch; without, a batch runs to its end alone, as PEFT's does.
        most_running: most requests in a batch; None: the scheduler's limits alone.
    """

    def __init__(self, most_passed: int = 30, joining: bool = True, most_running: int | None = None) -> None:
        self.most_passed, self.joining, self.most_running = most_passed, joining, most_running

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """The running adapter's requests, or those of the head of the queue, in order of arrival."""
        room = None if self.most_running is None else self.most_running - len(running)
        if not waiting or (running and not self.joining):
            return Ordering([])
        adapter = (running or waiting)[0].adapter_id
        passed, chosen = 0, []
        for sequence in waiting:
            if sequence.adapter_id == adapter:
                chosen.append(sequence)
            else:
                passed += 1
            if passed > self.most_passed:
                break
        return Ordering(chosen[:room])
