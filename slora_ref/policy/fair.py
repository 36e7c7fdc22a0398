"""Fair sharing between adapters: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models").

Each adapter, and the base model as one more, has a counter of the service that it got; the lowest counter comes next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from slora_ref.policy.base import Ordering, Rounds
from slora_ref.request import Sequence


class FairShare:
    """Weighted fair sharing across adapters, in order of arrival within each.

    Service is `prompt_cost` a prompt token, charged at the start, and `output_cost` a generated token, charged as they
    come. An adapter that had nothing to do comes back at the lowest counter of those that had: idling saves up
    nothing.

    Fairness: of two adapters of equal weight that both have requests waiting all the time, the counters differ by at
    most 2 U, with U = max(prompt_cost x the longest prompt, output_cost x the most tokens that the running batch can
    still generate): a request is never picked above the lowest counter, and what runs when it is picked can add no
    more. Divide by the weights where they differ.

    Starvation: none; a counter that is served grows, so every waiting adapter becomes the lowest.

    Args:
        weights: share of each adapter id; 1 for those not named.
    """

    def __init__(
        self, weights: Mapping[int, float] | None = None, prompt_cost: float = 1.0, output_cost: float = 2.0
    ) -> None:
        self.weights = dict(weights or {})
        self.prompt_cost, self.output_cost = prompt_cost, output_cost
        self.counters: dict[int, float] = defaultdict(float)
        self._charged: dict[int, tuple[Sequence, int]] = {}  # by number: who runs, and the generated tokens charged
        self._rounds = Rounds()
        self._active: set[int] = set()  # adapters that waited or ran in the last round

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> Ordering:
        """Again and again the oldest request of the adapter with the lowest counter, each charged its prompt."""
        self._charge(waiting, running)
        self._lift(waiting, running)
        queues: dict[int, deque[Sequence]] = defaultdict(deque)
        for sequence in waiting:
            queues[sequence.adapter_id].append(sequence)
        heap = [(self.counters[adapter], adapter) for adapter in queues]
        heapq.heapify(heap)
        candidates = []
        while heap:
            counter, adapter = heapq.heappop(heap)
            sequence = queues[adapter].popleft()
            candidates.append(sequence)
            if queues[adapter]:
                heapq.heappush(heap, (counter + self._price(adapter, sequence.prompt_length, 0), adapter))
        self._rounds.offer(candidates)
        return Ordering(candidates)

    def _price(self, adapter: int, prompt: int, output: int) -> float:
        return (self.prompt_cost * prompt + self.output_cost * output) / self.weights.get(adapter, 1.0)

    def _charge(self, waiting: Seq[Sequence], running: Seq[Sequence]) -> None:
        """What was done since the last round, also for sequences that have ended or were preempted since."""
        for sequence in self._rounds.started(waiting):
            if sequence.number not in self._charged:
                self.counters[sequence.adapter_id] += self._price(sequence.adapter_id, sequence.prompt_length, 0)
                self._charged[sequence.number] = sequence, 0
        alive = {sequence.number for sequence in [*waiting, *running]}
        for number, (sequence, charged) in list(self._charged.items()):
            generated = len(sequence.tokens) - sequence.prompt_length
            self.counters[sequence.adapter_id] += self._price(sequence.adapter_id, 0, generated - charged)
            self._charged[number] = sequence, generated
            if number not in alive:
                del self._charged[number]

    def _lift(self, waiting: Seq[Sequence], running: Seq[Sequence]) -> None:
        """Brings adapters that come back up to those that stayed; the last to be served sets the level if none did."""
        now_active = {sequence.adapter_id for sequence in [*waiting, *running]}
        stayed = self._active & now_active or self._active
        level = min((self.counters[adapter] for adapter in stayed), default=0.0)
        for adapter in now_active - self._active:
            self.counters[adapter] = max(self.counters[adapter], level)
        self._active = now_active
