"""Sends requests at their times and steps until all have ended: the loop that both demos share."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slora_ref.demo.watch import PoolWatch
from slora_ref.engine import Completion, Engine
from slora_ref.request import SamplingParams


@dataclass(frozen=True)
class Ask:
    """A request to come, so many seconds after the start."""

    prompt: str | Seq[int]
    params: SamplingParams
    adapter: str
    arrival: float


def serve(engine: Engine, asks: Seq[Ask], watch: PoolWatch) -> list[Completion]:
    """Serves all; completions in the order of the requests. `asks` are in order of arrival."""
    ids: list[int] = []
    done: dict[int, Completion] = {}
    start = engine.clock.now()
    while len(done) < len(asks):
        while len(ids) < len(asks) and asks[len(ids)].arrival <= engine.clock.now() - start:
            ask = asks[len(ids)]
            ids.append(engine.add_request(ask.prompt, ask.params, ask.adapter))
        if not engine.has_work:
            time.sleep(max(0.0, asks[len(ids)].arrival - (engine.clock.now() - start)))
            continue
        for news in engine.step():
            if news.completion is not None:
                done[news.request_id] = news.completion
        watch.sample(len(done))
    return [done[request_id] for request_id in ids]
