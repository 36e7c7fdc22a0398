"""What the replay shows: comparisons that the paper draws, and some that it does not stress, counted from the rows."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from slora_ref.paper.bars import shard_closeness
from slora_ref.paper.play import Row

Rows = dict[str, list[Row]]
NOTICEABLE = 0.03
"""Two throughputs of the authors that differ by less have no order: their system repeats itself to about 3 %."""


def findings(rows: Rows) -> str:
    """A list, one finding a line."""
    makers: tuple[Callable[[Rows], str], ...] = (
        orders,
        abort_attainment,
        abort_best,
        merging,
        first_adapter,
        packing,
        clustering,
        messages,
    )
    return "\n".join(f"- {make(rows)}" for make in makers) + "\n"


def _values(rows: Seq[Row], metric: str) -> dict[str, tuple[float, float]]:
    """(ours, theirs) by the name of the point."""
    return {row.point: (row.ours or 0.0, row.theirs) for row in rows if row.metric == metric}


@dataclass(frozen=True)
class Pair:
    """Two systems at one point, whose throughputs the authors found to differ: (ours, theirs) of each."""

    place: str
    names: tuple[str, str]
    first: tuple[float, float]
    second: tuple[float, float]

    @property
    def right(self) -> bool:
        """Whether the same one is the faster here."""
        return (self.first[0] > self.second[0]) == (self.first[1] > self.second[1])


def noticeable_pairs(rows: Rows) -> list[Pair]:
    """Pairs of S-LoRA, no-unify and bmm at one point of fig5 and fig6 that differ in the paper."""
    pairs = []
    for figure in ("fig5", "fig6"):
        values = _values(rows[figure], "throughput")
        for place in dict.fromkeys(point.rpartition(" ")[0] for point in values):
            systems = [name for name in ("slora", "no-unify", "bmm") if f"{place} {name}" in values]
            for names in combinations(systems, 2):
                first, second = (values[f"{place} {name}"] for name in names)
                if abs(first[1] / second[1] - 1) > NOTICEABLE:
                    pairs.append(Pair(f"{figure} {place}", names, first, second))
    return pairs


def orders(rows: Rows) -> str:
    """How many of those pairs are in the right order."""
    pairs = noticeable_pairs(rows)
    right = f"{sum(pair.right for pair in pairs)} of {len(pairs)} pairs that differ by 3 % are in the right order"
    return f"S-LoRA, no-unify and bmm in fig5 and fig6: {right}."


def abort_attainment(rows: Rows) -> str:
    """fig10's attainments, of which nothing was fitted but two of its runs' throughput and latency."""
    off = [abs(ours - theirs) for ours, theirs in _values(rows["fig10"], "attainment").values()]
    near = sum(difference <= 0.1 for difference in off)
    median_off = f"the median is off by {median(off):.3f}"
    return f"fig10: attainment is within 0.1 of the authors' at {near} of {len(off)} points, {median_off}."


def abort_best(rows: Rows) -> str:
    """Early abort where the paper's lead is clear, and elsewhere."""
    values = _values(rows["fig10"], "attainment")
    led = clear = close = other = 0
    for place in dict.fromkeys(point.rpartition(" ")[0] for point in values):
        abort, rivals = values[f"{place} abort"], [values[f"{place} {policy}"] for policy in ("fcfs", "lcfs")]
        ours, theirs = (abort[side] - max(rival[side] for rival in rivals) for side in (0, 1))
        clear, other = clear + (theirs >= NOTICEABLE), other + (theirs < NOTICEABLE)
        led, close = led + (theirs >= NOTICEABLE and ours > 0), close + (theirs < NOTICEABLE and ours >= -NOTICEABLE)
    where = f"at {led} of the {clear} points where it clearly does in the paper"
    return f"Early abort leads {where}, and is within 0.03 of the best at {close} of the other {other}."


def merging(rows: Rows) -> str:
    """The faster of merging and computing on the fly, by the number of adapters."""
    values = _values(rows["fig9"], "throughput")
    told = []
    for adapters in (1, 2, 5):
        merges = [point for point in values if point.startswith(f"n={adapters} ") and point.endswith(" merge")]
        pairs = [(values[point], values[point.replace(" merge", " slora")]) for point in merges]
        ours = sum(merge[0] > fly[0] for merge, fly in pairs)
        theirs = sum(merge[1] > fly[1] for merge, fly in pairs)
        agree = sum((merge[0] > fly[0]) == (merge[1] > fly[1]) for merge, fly in pairs)
        told.append(f"at n = {adapters} at {ours} of {len(pairs)} points (authors: {theirs}; the same side at {agree})")
    return "Merging is faster than computing on the fly " + ", ".join(told) + "."


def first_adapter(rows: Rows) -> str:
    """What n = 1 loses against the base model alone."""
    values = _values(rows["fig5"], "throughput")
    told = []
    for place, rate in (("S2 a100-80", 10), ("S4 a100-80", 6), ("S4 a100-40", 2)):
        base, one, many = (values[f"{place} n={n} R={rate} slora"] for n in (0, 1, 200))
        losses = [
            f"{one[side] / base[side] - 1:.0%} and then {many[side] / one[side] - 1:.0%} up to 200" for side in (0, 1)
        ]
        told.append(f"{place}: {losses[0]} (authors: {losses[1]})")
    return "The first adapter costs the most. Throughput, " + "; ".join(told) + "."


def packing(rows: Rows) -> str:
    """S-LoRA against n merged models."""
    values = _values(rows["table3"], "throughput")
    told = []
    for place in ("S2 a100-80 n=5", "S4 a100-80 n=2"):
        slora, packed = values[f"{place} slora"], values[f"{place} packed"]
        told.append(f"{place}: {slora[0] / packed[0]:.1f} x (authors: {slora[1] / packed[1]:.1f} x)")
    return "The lead over packed models is large only where their weights leave no memory. " + "; ".join(told) + "."


def clustering(rows: Rows) -> str:
    """The best of few clusters against none, in attainment."""
    right = count = 0
    for name in ("fig11", "fig12"):
        values = _values(rows[name], "attainment")
        for place in dict.fromkeys(point.rpartition(" ")[0] for point in values):
            few = [values[f"{place} d={d}"] for d in (1, 2, 4, 8)]
            none = values[f"{place} d=32"]
            if max(theirs for _, theirs in few) - none[1] > 0.15:
                count += 1
                right += max(ours for ours, _ in few) > none[0]
    where = "where the authors' best of d <= 8 leads d = 32 by more than 0.15 in attainment"
    return f"Clustering matters for the SLO: {where}, it leads here at {right} of {count} points."


def messages(rows: Rows) -> str:
    """fig8: what the adapters' messages take of the throughput."""
    close = shard_closeness(rows["fig8"])
    ours, theirs = ([1 - ratio[side] for ratio in close.ratios] for side in (0, 1))
    lost = f"{min(ours):.0%} to {max(ours):.0%} of the throughput (authors: {min(theirs):.0%} to {max(theirs):.0%}"
    order = f"base model > without messages > S-LoRA in {close.ordered} of {close.rows} rows"
    return (
        f"Few bytes, much time: on several GPUs the adapters' messages take {lost}; off by {close.worst_ratio:.3f} at "
        f"most in the {len(close.ratios)} rows that nothing was fitted on); {order}."
    )
