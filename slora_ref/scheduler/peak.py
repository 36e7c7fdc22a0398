"""The most tokens that a set of sequences can hold at once, over all the steps to come.

The sum of all full lengths would be safe but wasteful: sequences end at different times. If all decode in lockstep, the
pool is fullest just before one of them ends, so it is enough to look at those moments (the rule of LightLLM, which
S-LoRA's admission builds on).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Lifetime(NamedTuple):
    """What one sequence will hold: in step t from now, tokens - 1 + min(t, left), until step left + delay.

    Args:
        tokens: known tokens (prompt and generated).
        left: most tokens still to be generated, at least 1.
        delay: steps that it may lag behind, waiting for its prefill or for that of others.
    """

    tokens: int
    left: int
    delay: int = 0

    @property
    def end(self) -> int:
        """The last step in which it can hold pages."""
        return self.left + self.delay


def peak_tokens(lifetimes: Iterable[Lifetime]) -> int:
    """The most tokens with keys and values at any step, at worst. O(n log n).

    Exact without delays. With them an upper bound (a late sequence is counted as if it grew at once and ended late),
    and never above the sum of the full lengths.
    """
    by_end = sorted(lifetimes, key=lambda life: -life.end)
    by_left = sorted(by_end, key=lambda life: -life.left)
    peak = held = growing = full = (
        0  # of the sequences alive at step t: sum of tokens - 1, those growing, sum of left of the rest
    )
    next_growing = 0
    for index, life in enumerate(by_end):
        held += life.tokens - 1
        full += life.left
        step = life.end
        while next_growing < len(by_left) and by_left[next_growing].left >= step:
            full -= by_left[next_growing].left
            growing += 1
            next_growing += 1
        last_of_its_end = index + 1 == len(by_end) or by_end[index + 1].end != step
        if last_of_its_end:
            peak = max(peak, held + growing * step + full)
    return peak
