"""PoolWatch: what the pool holds while the demo runs, as numbers for the report and as bars for the eye."""

from __future__ import annotations

from collections.abc import Callable

from slora_ref.engine import Engine
from slora_ref.metrics import Occupancy
from slora_ref.pager import PoolUsage
from slora_ref.pager.census import KV, page_owners
from slora_ref.shapes import Array, Int

BAR_WIDTH, SHORTEST_BAR = 56, 4
KV_MARK, ADAPTER_MARK, FREE_MARK = "█", "▒", "·"
LEGEND = f"{KV_MARK} keys and values   {ADAPTER_MARK} adapter weights   {FREE_MARK} free"

Draw = Callable[[Callable[[int], str]], None]
"""Takes a live line: a function that makes it for a terminal of so many columns."""


def pool_bar(usage: PoolUsage, width: int = BAR_WIDTH) -> str:
    """The pool as one line of `width` marks; whatever is used at all has at least one."""
    pages = usage.kv + usage.adapter + usage.free
    kv = -(-usage.kv * width // pages)
    adapter = min(-(-usage.adapter * width // pages), width - kv)
    return KV_MARK * kv + ADAPTER_MARK * adapter + FREE_MARK * (width - kv - adapter)


def live_line(usage: PoolUsage, caption: str, count: str, columns: int) -> str:
    """The bar, a caption and how much is done, in less than `columns`: the bar gives way first, then the caption, and
    the count never.
    """
    for words in (f"{caption} {count}", count):
        width = min(BAR_WIDTH, columns - len(words) - 2)  # a space between, and the last column stays empty
        if width >= SHORTEST_BAR:
            return f"{pool_bar(usage, width)} {words}"
    return count[: columns - 1]


class PoolWatch:
    """Samples the pool after each step, that is after each run of the model.

    Args:
        engine: to look at.
        requests: how many there will be.
        draw: takes the live line; None: none is made.
    """

    def __init__(self, engine: Engine, requests: int, draw: Draw | None) -> None:
        self._engine, self._requests, self._draw = engine, requests, draw
        self.occupancy = Occupancy()
        self.residents: list[int] = []
        self.running: list[int] = []
        self.fullest: Int[Array, " pages"] = page_owners(engine.pool)  # who owned each page when sequences held most

    def sample(self, done: int) -> None:
        """The engine has been called and `done` requests have ended; where no model ran, that was no step."""
        engine, usage = self._engine, self._engine.pool.usage()
        if engine.steps > len(self.residents):
            if usage.kv > self.occupancy.peak_kv:
                self.fullest = page_owners(engine.pool)
            self.occupancy.sample(usage)
            self.residents.append(engine.prefetcher.resident)
            self.running.append(len(engine.scheduler.running))
        if self._draw is not None and self.residents:
            caption, count = self._caption(len(self.residents)), f"done {done}/{self._requests}"
            self._draw(lambda columns: live_line(usage, caption, count, columns))

    def _caption(self, step: int) -> str:
        return f"{self.running[step - 1]:3d} running {self.residents[step - 1]:2d} adapters"

    def history(self, lines: int = 12) -> list[str]:
        """The run as at most `lines` bars, evenly spaced over its steps, which are counted from 1."""
        steps = len(self.residents)
        chosen = sorted({1 + round(i * (steps - 1) / max(1, lines - 1)) for i in range(lines)}) if steps else []
        bars = [pool_bar(self.occupancy.usages[step - 1]) for step in chosen]
        return [f"step {step:4d} {bar} {self._caption(step)}" for step, bar in zip(chosen, bars, strict=True)]


__all__ = ["KV", "LEGEND", "Draw", "PoolWatch", "live_line", "pool_bar"]
