"""Trains the toy base model: a Llama of two layers that copies words, and has met most tasks on the way.

While it trains, a task's own token stands in place of the begin token and says which task is meant; after the plain
begin token the word is copied. The task tokens are cut off at the end, so the shipped model can only copy; what it
learned about letters stays in its weights, and an adapter of rank 2 is enough to call it back. Five tasks are never
shown to it: their adapters must learn them from nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slora_ref.toy.learning import Example, exact_share, example, fit, rate
from slora_ref.toy.tasks import BASE_TASK, TASKS, Task
from slora_ref.toy.vocabulary import BOS_ID, EOS_ID, SIZE
from slora_ref.toy.words import distinct_words, stream

UNSEEN: Final = ("caesar-5", "double-first", "drop-vowels-upper", "reverse-upper", "rotate-right")
SHOWN: Final = (BASE_TASK, *(task for task in TASKS.values() if task.name not in UNSEEN))
OFTENER: Final = {"copy": 2.0, "reverse-word": 1.5, "mirror-word": 1.5, "swap-pairs": 1.5, "drop-vowels": 1.5}
SEED: Final = 1
STEPS: Final = 2600
BATCH: Final = 128
PEAK_RATE: Final = 3e-3


def base_config(vocab_size: int) -> LlamaConfig:
    """Two layers; query heads and FFN can be split over 2 or 4 shards, the two key-value heads over 2."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )


def train_base() -> Any:
    """The trained model, still with the rows of the task tokens."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(base_config(SIZE + len(SHOWN) - 1))
    initialise(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    fit(model, optimiser, _batches(), lambda step: rate(step, STEPS, warm_up=100, hold=0.5), 4, _report)
    return model


def without_task_tokens(model: Any) -> Any:
    """The model that ships: embedding and head end after the vocabulary."""
    shipped = LlamaForCausalLM(base_config(SIZE))
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:SIZE].clone()
    shipped.load_state_dict(state)
    return shipped


def first_id(task: Task) -> int:
    """The token that stands in place of the begin token to ask for `task`; the begin token itself asks for a copy."""
    place = SHOWN.index(task)
    return BOS_ID if place == 0 else SIZE + place - 1


def task_shares(model: Any, words: int) -> dict[str, float]:
    """How well the model does each task when it is told which, on validation words."""
    chosen = distinct_words(SEED, words, "validation")
    return {task.name: exact_share(model, [example(task, word, first_id(task)) for word in chosen]) for task in SHOWN}


def initialise(model: Any) -> None:
    """Variance 1/fan_in in every matrix; what writes into the residual stream smaller by its number of writers."""
    writers = 2 * model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if "norm" in name:
            continue
        sd = {"embed_tokens": 0.5, "lm_head": 0.05}.get(name.split(".")[-2], weight.shape[1] ** -0.5)
        if name.split(".")[-2] in ("o_proj", "down_proj"):
            sd /= writers**0.5
        torch.nn.init.normal_(weight, 0.0, sd)


def _batches() -> Iterator[list[Example]]:
    rng = random.Random(SEED)
    words = stream(SEED, "train")
    weights = [OFTENER.get(task.name, 1.0) for task in SHOWN]
    for _ in range(STEPS):
        tasks = rng.choices(SHOWN, weights, k=BATCH)
        yield [example(task, next(words), first_id(task)) for task in tasks]


def _report(step: int, loss: float) -> None:
    if (step + 1) % 100 == 0:
        print(f"base: step {step + 1} of {STEPS}, loss {loss:.4f} per answer token", flush=True)
