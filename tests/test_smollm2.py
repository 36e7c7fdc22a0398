"""A real model, SmolLM2-135M, live against transformers and peft: text, tokens, logits. Run by `make oracle`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smollm2_folder import gguf_path, in_halves, write_smollm2_folder
from tiny import TARGETS, write_adapter_folder

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Engine
from slora_ref.request import SamplingParams
from slora_ref.tokenizer import IncrementalDecoder, Tokenizer

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
RANKS = (4, 8, 16, 32) * 8
NEW_TOKENS = 24
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TEXTS = (
    "Hello, world!",
    "你好 🙂 naïve",
    "x = 1234567",
    "  two  spaces\n\ttab",
    "<|im_start|>user",
    "",
    "a\u0301 \U0001f468\u200d\U0001f469",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, 270 MB."""
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    try:
        gguf_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return write_smollm2_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    """The model as transformers has it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Any, ids: list[int]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """transformers' logits of the prompt, its greedy tokens, and the gaps between the best two logits."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        options = {
            "do_sample": False,
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": NEW_TOKENS,
            "output_logits": True,
        }
        done = model.generate(torch.tensor([ids]), return_dict_in_generate=True, eos_token_id=None, **options)
    best = np.sort(np.stack([step[0].numpy() for step in done.logits]))
    return logits, done.sequences[0, len(ids) :].tolist(), best[:, -1] - best[:, -2]


def test_rows_of_q_and_k_go_back_into_halves() -> None:
    pairs = np.arange(8)[:, None].repeat(3, 1)
    assert in_halves(pairs, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_tokens_and_chat_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.chat(QUESTION) == theirs.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"] and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        decoder = IncrementalDecoder(ours, [])
        assert "".join(map(decoder.push, ids)) + decoder.flush() == ours.decode(ids)


def test_the_base_model_answers_in_sense(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, EngineConfig(max_length=256))
    tokenizer = Tokenizer.from_folder(folder)
    [answer] = engine.generate([tokenizer.chat(QUESTION)], SamplingParams(max_tokens=NEW_TOKENS))
    assert answer.text.strip() == "The capital of France is Paris."


def test_one_batch_of_adapters_is_peft_one_by_one(folder: Path, model: Any, tmp_path: Path) -> None:
    """32 adapters of ranks 4 to 32 on all seven targets and a base row, in one batch of the engine."""
    from peft import PeftModel

    config = ModelConfig.from_folder(folder)
    prompt = Tokenizer.from_folder(folder).encode("Once upon a time, in a small village by the sea, there lived")
    engine = Engine.from_pretrained(folder, EngineConfig(max_length=256))
    names = [f"rank-{rank}-{seed}" for seed, rank in enumerate(RANKS)]
    for seed, (rank, name) in enumerate(zip(RANKS, names, strict=True)):
        write_adapter_folder(tmp_path / name, config, rank, TARGETS, seed=seed, sd=0.03, use_rslora=rank == 16)
        engine.add_adapter(name, tmp_path / name)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, keep_logits=True)
    answers = engine.generate([prompt] * (1 + len(names)), params, [None, *names])
    wanted = [greedy(model, prompt)]
    tuned = PeftModel.from_pretrained(model, str(tmp_path / names[0]), adapter_name=names[0]).eval()
    for name in names:
        if name != names[0]:
            tuned.load_adapter(str(tmp_path / name), adapter_name=name)
        tuned.set_adapter(name)
        wanted.append(greedy(tuned, prompt))
    tuned.unload()
    for answer, (logits, tokens, gaps) in zip(answers, wanted, strict=True):
        largest = abs(logits).max()
        assert abs(np.stack(answer.logits[: len(prompt)]) - logits).max() <= 2e-4 * largest
        assert answer is answers[0] or abs(logits - wanted[0][0]).max() > 0.1
        agreed = [ours == theirs for ours, theirs in zip(answer.token_ids, tokens, strict=True)]
        assert all(agreed) or gaps[agreed.index(False)] <= 4e-4 * largest
