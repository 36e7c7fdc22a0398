"""What the baseline's process measures, all of it through `generate`, as a user of PEFT calls it."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import transformers

from slora_ref.bench.peft_baseline.model import random_model
from slora_ref.bench.peft_baseline.process import PeftModelSpec, ServedTrace, StepTask, TraceTask
from slora_ref.workload import Arrival

STEPS = 32  # timed, in the middle of which the context is as long as asked for


def answers(spec: PeftModelSpec, tasks: list[StepTask] | list[TraceTask]) -> Iterator[float | ServedTrace]:
    """One for each task, in order; the model is made once."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model = random_model(spec)
    _generate(model, [[1, 2, 3]], 2)  # the libraries of the device are loaded
    for task in tasks:
        yield step_ms(model, task) if isinstance(task, StepTask) else serve(model, spec.adapters, task)


class TokenClock:
    """A streamer of `generate`: it gets the prompts, then the tokens of each step, and keeps the time of each call.

    By then the tokens are in host memory: the device has ended the step.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Prompts or tokens have come."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """There are no more."""


def step_ms(model: Any, task: StepTask) -> float:
    """Median milliseconds between the tokens of a batch of one length."""
    prompts = _prompts(model, [max(1, task.context - STEPS // 2)] * task.batch)
    if task.adapters > 1:
        times = _generate(model, prompts, 1 + STEPS, adapter_names=[str(i % task.adapters) for i in range(task.batch)])
    else:
        model.set_adapter("0")
        with contextlib.nullcontext() if task.adapters else model.disable_adapter():
            times = _generate(model, prompts, 1 + STEPS)
    return 1e3 * statistics.median(after - before for before, after in pairwise(times[1:]))


def serve(model: Any, adapters: int, task: TraceTask) -> ServedTrace:
    """The adapter of the oldest request that waits is next, with all its waiting requests that a batch can hold.

    Adapters beyond those that the model has share their weights, as the engine's names share folders.
    """
    waiting, served, firsts = list(task.arrivals), list[Arrival](), list[float]()
    batches = computed = 0
    seconds, start = 0.0, time.perf_counter()
    while waiting and time.perf_counter() - start < task.limit_s:
        now = time.perf_counter() - start
        if waiting[0].time > now:
            time.sleep(min(waiting[0].time, task.limit_s) - now)
            continue
        here = [one for one in waiting if one.time <= now and one.adapter == waiting[0].adapter][: task.most]
        model.set_adapter(str(here[0].adapter % adapters))
        longest = max(one.output for one in here)
        times = _generate(model, _prompts(model, [one.prompt for one in here]), longest)
        firsts += [times[1] - start - one.time for one in here]
        seconds = time.perf_counter() - start
        served, batches, computed = served + here, batches + 1, computed + longest * len(here)
        for one in here:
            waiting.remove(one)
    return ServedTrace(served, firsts, seconds, batches, computed)


def _prompts(model: Any, lengths: list[int]) -> list[list[int]]:
    return [[(31 * i + 7 * j) % model.config.vocab_size for j in range(length)] for i, length in enumerate(lengths)]


def _generate(model: Any, prompts: list[list[int]], tokens: int, **options: Any) -> list[float]:
    """Greedy tokens for prompts that are padded on the left to the longest; times of prompts and of each token."""
    clock, longest = TokenClock(), max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, real = torch.tensor(padded, device=model.device), torch.tensor(mask, device=model.device)
    options |= {"do_sample": False, "pad_token_id": 0, "streamer": clock}
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=real, max_new_tokens=tokens, **options)
    return clock.times
