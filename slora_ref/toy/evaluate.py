"""Measures every adapter, and the base without one, on every task: transformers and PEFT on the exported files.

An adapter answers the words once; the answers are then held against the rules of all tasks.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

import torch
from peft import PeftModel
from transformers import AutoTokenizer

from slora_ref.toy.accuracy import BASE
from slora_ref.toy.files import ToyFiles
from slora_ref.toy.tasks import TASKS, prompt
from slora_ref.toy.train_adapters import load_base
from slora_ref.toy.words import held_out_words

SEED: Final = 7
WORDS: Final = 1000
LONGEST_ANSWER: Final = 24
LIBRARIES: Final = ("torch", "transformers", "peft")
COMMAND: Final = "python -m slora_ref.toy.train"


def measure(files: ToyFiles) -> dict[str, Any]:
    """The content of accuracy.json."""
    return {
        "command": COMMAND,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
        "compute": "float32",
        "words": WORDS,
        "words_seed": SEED,
        "model_bytes": files.size(files.model),
        "adapters": {
            task.name: {"rank": task.rank, "bytes": files.size(files.adapter(task.name)), "rule": task.description}
            for task in TASKS.values()
        },
        "matrix": _matrix(files, held_out_words(SEED, WORDS)),
        "sha256": files.digests(),
    }


def load_all(files: ToyFiles) -> Any:
    """The base with all adapters, each under its task's name, in float32."""
    first, *rest = TASKS
    model: Any = PeftModel.from_pretrained(load_base(files), files.adapter(first), adapter_name=first)
    for name in rest:
        model.load_adapter(files.adapter(name), adapter_name=name)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    return model.eval()


def answers(model: Any, tokenizer: Any, words: list[str]) -> list[str | None]:
    """The greedy answer to each word; None where it does not end. Words of one length go together: no padding."""
    by_length: dict[int, list[str]] = defaultdict(list)
    for word in words:
        by_length[len(word)].append(word)
    found: dict[str, str | None] = {}
    for group in by_length.values():
        questions = tokenizer([prompt(word) for word in group], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**questions, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        for word, row in zip(group, ids[:, questions["input_ids"].shape[1] :].tolist(), strict=True):
            found[word] = _text(tokenizer, row)
    return [found[word] for word in words]


def _text(tokenizer: Any, ids: list[int]) -> str | None:
    if tokenizer.eos_token_id not in ids:
        return None
    text: str = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)])
    return text


def _matrix(files: ToyFiles, words: list[str]) -> dict[str, dict[str, float]]:
    model, tokenizer = load_all(files), AutoTokenizer.from_pretrained(files.model)
    matrix = {}
    for name in TASKS:
        model.set_adapter(name)
        matrix[name] = _row(answers(model, tokenizer, words), words)
        print(f"{name}: {matrix[name][name]:.2%} of its own task", flush=True)
    with model.disable_adapter():
        matrix[BASE] = _row(answers(model, tokenizer, words), words)
    return matrix


def _row(given: list[str | None], words: list[str]) -> dict[str, float]:
    """Share of the answers that are right by each task's rule."""
    return {
        task.name: sum(answer == task.function(word) for answer, word in zip(given, words, strict=True)) / len(words)
        for task in TASKS.values()
    }
