"""Trains one LoRA adapter for each task, with PEFT, on the base model as it ships.

The base is read back from its float16 file and frozen, so an adapter learns on exactly the weights that it will meet.
An adapter that does not do its task on validation words is trained again from another seed and for longer; its rank
stays. The test words have no say in this.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from zlib import crc32

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from slora_ref.toy.files import ToyFiles
from slora_ref.toy.learning import Example, exact_share, example, fit, rate
from slora_ref.toy.tasks import Task
from slora_ref.toy.words import distinct_words, stream

TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTEMPTS: Final = (400, 800, 1600, 3200)
BATCH: Final = 32
PEAK_RATE: Final = 4e-3
VALIDATION_SEED: Final = 1
VALIDATION_WORDS: Final = 600
GOOD_ENOUGH: Final = 0.995


def load_base(files: ToyFiles) -> Any:
    """The exported base, float16 on disk, computing in float32."""
    return LlamaForCausalLM.from_pretrained(files.model, dtype=torch.float32)


def lora_config(task: Task) -> LoraConfig:
    """LoRA on the four attention projections, scale alpha/r = 2."""
    return LoraConfig(
        r=task.rank,
        lora_alpha=2 * task.rank,
        lora_dropout=0.0,
        target_modules=list(TARGETS),
        bias="none",
        task_type="CAUSAL_LM",
    )


def train_adapter(base: Any, task: Task) -> Any:
    """The PEFT model with a trained adapter; its `unload()` gives the base back.

    Raises RuntimeError if no attempt was good enough.
    """
    for attempt, steps in enumerate(ATTEMPTS):
        model = _attempt(base, task, steps, seed=crc32(f"{task.name} {attempt}".encode()))
        share = validation_share(model, task)
        print(f"{task.name}: rank {task.rank}, {steps} steps, {share:.4f} of the validation words right", flush=True)
        if share >= GOOD_ENOUGH:
            return model
        base = model.unload()
    raise RuntimeError(f"{task.name} does not reach {GOOD_ENOUGH} at rank {task.rank}: raise the rank or drop the task")


def validation_share(model: Any, task: Task) -> float:
    """Share of validation words that are exactly right."""
    words = distinct_words(VALIDATION_SEED, VALIDATION_WORDS, "validation")
    return exact_share(model, [example(task, word) for word in words])


def _attempt(base: Any, task: Task, steps: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = get_peft_model(base, lora_config(task))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    fit(model, optimiser, _batches(task, steps, seed), lambda step: rate(step, steps, warm_up=30, hold=0.4), 2)
    _round_to_float16(trained)
    return model


def _round_to_float16(weights: list[torch.nn.Parameter]) -> None:
    """What is validated is what the file will hold."""
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.half().float())


def _batches(task: Task, steps: int, seed: int) -> Iterator[list[Example]]:
    words = stream(seed, "train")
    for _ in range(steps):
        yield [example(task, word) for word in islice(words, BATCH)]
