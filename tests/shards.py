"""Runs something on every shard at once, each on a thread, for the tests of tensor parallelism."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from slora_ref.tp.communicator import Communicator

Result = TypeVar("Result")
DEADLINE = 10.0  # seconds; what takes longer has hung


def on_all_shards(communicators: Sequence[Communicator], work: Callable[[Communicator], Result]) -> list[Result]:
    """What `work` returns on each shard; a shard that raises ends the group, and its exception is raised here."""
    futures: list[Future[Result]] = [Future() for _ in communicators]

    def run(communicator: Communicator, future: Future[Result]) -> None:
        try:
            future.set_result(work(communicator))
        except BaseException as error:  # noqa: BLE001  raised again by result()
            communicator.fail(f"shard {communicator.shard.index}: {error!r}")
            future.set_exception(error)

    for pair in zip(communicators, futures, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    assert not wait(futures, DEADLINE).not_done, "a shard hangs"
    return [future.result() for future in futures]
