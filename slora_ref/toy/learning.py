"""What training the base and training an adapter have in common: examples, the loss, the learning rate.

An example is the tokens of `word=answer` between the begin and the end token. Only the answer and the end token count
for the loss: the model is never asked to guess a word. Knows transformers only by `model(input_ids=...).logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from slora_ref.toy.tasks import Task, prompt
from slora_ref.toy.vocabulary import EOS_ID, build_tokenizer

IGNORED: Final = -100
_TOKENIZER: Final = build_tokenizer()


@dataclass(frozen=True)
class Example:
    """ids: the whole sequence; answer_start: index of the answer's first token."""

    ids: tuple[int, ...]
    answer_start: int


def example(task: Task, word: str, first_id: int | None = None) -> Example:
    """`word` with its answer; `first_id` stands in place of the begin token (how the base is told the task)."""
    question = _TOKENIZER.encode(prompt(word)).ids
    answer = _TOKENIZER.encode(task.function(word), add_special_tokens=False).ids
    if first_id is not None:
        question[0] = first_id
    return Example((*question, *answer, EOS_ID), len(question))


def padded(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, both `[examples, longest]`. Padding stands behind, so causal attention needs no mask for it."""
    longest = max(len(one.ids) for one in examples)
    ids = torch.full((len(examples), longest), EOS_ID)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, one in enumerate(examples):
        tokens = torch.tensor(one.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, one.answer_start : len(tokens)] = tokens[one.answer_start :]
    return ids, labels


def accumulate_gradients(model: Any, examples: Sequence[Example], pieces: int) -> float:
    """Adds the gradient of the mean loss per answer token, and returns that loss.

    The examples go through in `pieces` of similar length: the same gradient, about half the padding.
    """
    by_length = sorted(examples, key=lambda one: len(one.ids))
    count = sum(len(one.ids) - one.answer_start for one in examples)
    size = -(-len(examples) // pieces)
    total = 0.0
    for start in range(0, len(by_length), size):
        ids, labels = padded(by_length[start : start + size])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def rate(step: int, steps: int, warm_up: int, hold: float) -> float:
    """Share of the peak learning rate: rises over `warm_up` steps, is 1 until `hold` of all steps, falls to 0."""
    falling = (steps - step) / (steps * (1.0 - hold))
    return min(1.0, (step + 1) / warm_up, falling)


def fit(
    model: Any,
    optimiser: torch.optim.Optimizer,
    batches: Iterable[Sequence[Example]],
    schedule: Callable[[int], float],
    pieces: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """One optimiser step a batch, gradients clipped to norm 1.

    `schedule(step)` is the learning rate's share of its peak; `pieces` as for `accumulate_gradients`.
    """
    peaks = [group["lr"] for group in optimiser.param_groups]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for step, examples in enumerate(batches):
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step)
        optimiser.zero_grad()
        loss = accumulate_gradients(model, examples, pieces)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        report(step, loss)


def exact_share(model: Any, examples: Sequence[Example]) -> float:
    """Share of examples whose greedy answer is exactly right.

    Every answer token is the likeliest one after the right tokens before it: the same as generating, in one pass.
    """
    ids, labels = padded(examples)
    with torch.no_grad():
        likeliest = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(dim=-1)
    labels = labels[:, 1:]
    right = (likeliest == labels) | (labels == IGNORED)
    return float(right.all(dim=1).double().mean())
