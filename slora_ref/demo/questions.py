"""What the demo asks: which adapters are registered, who asks for which, and when. All of it from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slora_ref.toy import TASKS, held_out_words, prompt
from slora_ref.toy.words import LENGTHS

POPULARITY = 0.3
"""Exponent of the power law over the names: small is skewed, 1 is uniform (the paper's alpha)."""
LONGEST_ANSWER = 32
"""Most tokens of an answer."""
LONGEST_PROMPT = prompt("z" * max(LENGTHS))
"""A prompt as long as any that is drawn: the model has a token for each character."""


@dataclass(frozen=True)
class Question:
    """One request of the demo.

    Args:
        adapter: registered name.
        task: what that adapter was trained to do.
        word: the word in the prompt; nobody was trained on it.
        arrival: seconds after the start.
    """

    adapter: str
    task: str
    word: str
    arrival: float

    @property
    def prompt(self) -> str:
        """The text that is sent."""
        return prompt(self.word)

    @property
    def rule_answer(self) -> str:
        """What the task's own rule makes of the word."""
        return TASKS[self.task].function(self.word)


def adapter_names(count: int) -> list[tuple[str, str]]:
    """(name, task) of `count` adapters: the trained ones in turn, each name a copy with pages of its own."""
    tasks = list(TASKS)
    return [(f"{tasks[i % len(tasks)]}.{i:04d}", tasks[i % len(tasks)]) for i in range(count)]


def draw_questions(names: list[tuple[str, str]], count: int, seed: int, rate: float | None) -> list[Question]:
    """`count` requests: adapter floor(u n) with u from Power(alpha), words held out from training, never filtered.

    Args:
        rate: requests a second (a Poisson process); None: all at once.
    """
    rng = np.random.default_rng(seed)
    picks = (rng.power(POPULARITY, count) * len(names)).astype(int)
    arrivals = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    words = held_out_words(seed, count)
    return [
        Question(name, task, word, float(arrival))
        for (name, task), word, arrival in zip((names[pick] for pick in picks), words, arrivals, strict=True)
    ]
