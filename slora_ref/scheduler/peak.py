"""The most tokens that a set of sequences can hold at once, over all the steps to come.

The sum of all full lengths would be safe but wasteful: sequences end at different times. If all decode in lockstep, the
pool is fullest just before one of them ends, so it is enough to look at those moments (the rule of LightLLM, which
S-LoRA's admission builds on).
"""

from __future__ import annotations

from collections.abc import Iterable

Lifetime = tuple[int, int, int]
"""(end, left, tokens): what one sequence will hold. In step t from now (t >= 1), tokens - 1 + min(t, left) tokens.

end: the last step in which it can hold pages; `left`, plus the steps that it may lag behind in prefill.
left: most tokens still to be generated, at least 1.
tokens: known tokens (prompt and generated).
"""


def peak_tokens(lifetimes: Iterable[Lifetime], lag: int = 0) -> int:
    """The most tokens with keys and values at any step, at worst. O(n log n).

    Exact where nothing lags (end = left, lag = 0). Otherwise an upper bound (a late sequence is counted as if it grew
    at once and ended late), and never above the sum of the full lengths.

    Args:
        lag: steps by which every end may come later.
    """
    by_end = sorted(lifetimes, reverse=True)
    if not lag and all(end == left for end, left, _ in by_end):
        return _peak_in_lockstep(by_end)
    by_left = sorted([left for _, left, _ in by_end], reverse=True)
    peak = 0
    held = growing = grown = 0  # of those alive in a step: tokens - 1; how many still grow; `left` of those that do not
    for on_time, left, tokens in by_end:
        end = on_time + lag
        held += tokens - 1
        grown += left
        while growing < len(by_left) and by_left[growing] >= end:
            grown -= by_left[growing]
            growing += 1
        peak = max(peak, held + growing * end + grown)
    return peak


def _peak_in_lockstep(by_end: list[Lifetime]) -> int:
    """The usual case: in the last step of one sequence, those that end no sooner are alive and have grown as much."""
    peak = held = 0
    for alive, (end, _, tokens) in enumerate(by_end, 1):
        held += tokens - 1
        if held + alive * end > peak:
            peak = held + alive * end
    return peak
