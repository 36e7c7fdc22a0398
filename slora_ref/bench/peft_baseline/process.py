"""The baseline's process: what it is asked, how it is started, and that its failures are named."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from slora_ref.config import ModelConfig
from slora_ref.errors import ConfigError, SloraError, how_to_install
from slora_ref.synthetic import AdapterKind
from slora_ref.workload import Arrival

PACKAGES = ("torch", "transformers", "peft")


class BaselineFailed(SloraError):
    """The baseline's process ended before it had measured all: out of memory, or packages that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class PeftModelSpec:
    """A model with random weights.

    Args:
        config: its shape.
        kind: of its adapters; adapter i has the name str(i).
        adapters: how many, at least one.
        device: "cpu" or "cuda".
        dtype: of all weights.
    """

    config: ModelConfig
    kind: AdapterKind
    adapters: int
    device: str
    dtype: str


@dataclass(frozen=True)
class StepTask:
    """Measure one decode step: the answer is its milliseconds, a float.

    Args:
        batch: requests of one length.
        adapters: distinct ones among them; 0 is the base model, 1 the usual way of PEFT, more a mixed batch.
        context: tokens that each request attends over.
    """

    batch: int
    adapters: int
    context: int


@dataclass(frozen=True)
class TraceTask:
    """Serve a trace, whole batches of one adapter at a time: the answer is a ServedTrace.

    Args:
        arrivals: in order of time.
        most: requests in a batch.
        limit_s: after so many seconds no other batch begins.
    """

    arrivals: list[Arrival]
    most: int
    limit_s: float


@dataclass(frozen=True)
class ServedTrace:
    """What was served of a trace.

    Args:
        served: requests of the batches that were run.
        first_token_s: for each, seconds from its arrival to its batch's first tokens.
        seconds: from the start to the end of the last batch.
        batches: their number.
        computed_tokens: all that were generated: every row of a batch goes on until the longest ends.
    """

    served: list[Arrival]
    first_token_s: list[float]
    seconds: float
    batches: int
    computed_tokens: int


def check_peft(shards: int) -> None:
    """Raises ConfigError where the baseline cannot run: a package is missing, or there are several shards."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ConfigError(f"the PEFT baseline needs {names}: {how_to_install('oracle')}, or leave --peft out")
    if shards > 1:
        raise ConfigError(f"shards is {shards}; the PEFT baseline runs on one device: leave --peft out")


def versions() -> dict[str, str]:
    """Of the packages that the baseline is made of."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def measure_peft(spec: PeftModelSpec, tasks: list[StepTask] | list[TraceTask]) -> Iterator[Any]:
    """The answer to each task, as soon as it is there. At the end the process is gone, and its memory with it.

    Raises:
        BaselineFailed: the process failed; with its error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(spec, tasks, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        for _ in tasks:
            answer = ours.recv()
            if isinstance(answer, BaselineFailed):
                raise answer
            yield answer
    except EOFError:
        process.join()
        raise BaselineFailed(f"PEFT's process has ended with exit code {process.exitcode}; see stderr") from None
    finally:
        process.kill()
        process.join()


def _work(spec: PeftModelSpec, tasks: list[StepTask] | list[TraceTask], link: Connection) -> None:
    """In the process: PyTorch is imported here, in no other."""
    try:
        for answer in importlib.import_module("slora_ref.bench.peft_baseline.measure").answers(spec, tasks):
            link.send(answer)
    except Exception as error:  # noqa: BLE001  whatever the libraries raise is told to the parent
        link.send(BaselineFailed(f"PEFT's process failed: {type(error).__name__}: {error}".splitlines()[0]))
