"""Writes the trained model and adapters as the folders that transformers and PEFT would write, in float16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerFast

from slora_ref.toy.files import ToyFiles
from slora_ref.toy.tasks import Task
from slora_ref.toy.train_adapters import TARGETS
from slora_ref.toy.vocabulary import BOS, EOS, UNKNOWN, build_tokenizer

BASE_NAME: Final = "slora_ref/toy/model"


def save_base(model: Any, files: ToyFiles) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    model.to(torch.float16).save_pretrained(files.model)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=EOS,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(files.model)
    _change(files.model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def save_adapter(model: Any, task: Task, files: ToyFiles) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT writes them; its empty model card is not kept."""
    folder = files.adapter(task.name)
    lora = {name: weight.half() for name, weight in model.state_dict().items() if "lora_" in name}
    model.save_pretrained(folder, state_dict=lora)
    (folder / "README.md").unlink()
    _change(folder / "adapter_config.json", target_modules=sorted(TARGETS), base_model_name_or_path=BASE_NAME)


def _change(path: Path, **values: Any) -> None:
    """Settles what would differ between two runs (PEFT's targets are a set, its base a path) or two versions."""
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
