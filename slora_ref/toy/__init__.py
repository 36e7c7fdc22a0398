"""A toy model that is small enough to ship: a Llama of characters and a trained adapter for each of some thirty tasks.

Tasks, words and folders come without torch. Training (train.py and what it imports) needs the extra `oracle`.
"""

from __future__ import annotations

from slora_ref.toy.files import ADAPTERS_FOLDER, MODEL_FOLDER, SHIPPED, ToyFiles
from slora_ref.toy.tasks import BASE_TASK, TASKS, Task, prompt
from slora_ref.toy.words import held_out_words

__all__ = [
    "ADAPTERS_FOLDER",
    "BASE_TASK",
    "MODEL_FOLDER",
    "SHIPPED",
    "TASKS",
    "Task",
    "ToyFiles",
    "held_out_words",
    "prompt",
]
