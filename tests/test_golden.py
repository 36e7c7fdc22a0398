"""Every variant of checkpoint and adapter against the logits of transformers + peft (made by tests/make_golden.py).

Once through the dense reference, which shows that loading is right, and once through the engine, where all adapters of
a base model share one batch and one pool. Bars: errors below 2e-4 of the largest logit, the same greedy tokens where
the gap between the best two allows, and every adapter at least 0.1 from its base model.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from golden.cases import (
    ADAPTER_CASES,
    FOLDER,
    MODEL_CASES,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    SAVED,
    AdapterCase,
    ModelCase,
    prompts,
    sha256,
)
from tiny import write_model_folder

from slora_ref.adapter import load_adapter, read_header
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Engine
from slora_ref.reference import Reference
from slora_ref.request import SamplingParams

TOLERANCE = 2e-4
MODELS = {case.name: case for case in MODEL_CASES}
SPELLED_MODELS = [(case, i) for case in MODEL_CASES for i in range(len(case.spellings))]
SPELLED_ADAPTERS = [(case, i) for case in ADAPTER_CASES for i in range(len((*case.spellings, *case.ours_only)))]
DECIDES = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, keep_logits=True)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """What transformers (and peft) answered."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def spelled(value: object) -> str | None:
    """A readable id of a case in the test's name."""
    return value.name if isinstance(value, (ModelCase, AdapterCase)) else None


def reference(model: Path, adapter: Path | None = None) -> Reference:
    """The dense forward pass of a folder, an adapter merged."""
    config = ModelConfig.from_folder(model)
    merged = None if adapter is None else load_adapter(read_header(adapter, config), config)
    return Reference(config, load_checkpoint(model, config), merged)


def assert_same_logits(name: str, logits: list[np.ndarray]) -> None:
    """The logits of the three prompts are those of the golden file."""
    for length, ours in zip(PROMPT_LENGTHS, logits, strict=True):
        theirs = golden(name)[f"logits_{length}"]
        error = abs(ours[:length, : theirs.shape[1]] - theirs).max() / abs(theirs).max()
        assert error <= TOLERANCE, f"{name}, prompt of {length}: error {error:.1e} of the largest logit"


def assert_same_tokens(name: str, row: int, tokens: list[int]) -> None:
    """The greedy tokens agree, up to the first step at which rounding may decide."""
    wanted, gaps = golden(name)["tokens"][row], golden(name)["gaps"][row]
    tolerance = 2 * TOLERANCE * max(abs(golden(name)[f"logits_{length}"]).max() for length in PROMPT_LENGTHS)
    for step, (ours, theirs) in enumerate(zip(tokens, wanted, strict=True)):
        if ours != theirs:
            assert gaps[step] <= tolerance, f"{name}, prompt {row}, step {step}: {ours} instead of {theirs}"
            return


def difference(left: str, right: str) -> float:
    """The largest difference between two golden files' logits."""
    return max(abs(golden(left)[f"logits_{n}"] - golden(right)[f"logits_{n}"]).max() for n in PROMPT_LENGTHS)


def saved_folders(name: str) -> tuple[Path, Path]:
    """A committed folder of transformers' save_pretrained and its adapter by peft's."""
    return FOLDER / "saved" / name, FOLDER / "saved" / f"{name}-adapter"


@pytest.mark.parametrize("case", MODEL_CASES, ids=spelled)
def test_weights_are_those_that_the_golden_files_were_made_from(case: ModelCase) -> None:
    assert sha256(case.weights()) == json.loads((FOLDER / "manifest.json").read_text())[case.name]["sha256"]


@pytest.mark.parametrize(("case", "spelling"), SPELLED_MODELS, ids=spelled)
def test_checkpoints_give_the_logits_of_transformers(case: ModelCase, spelling: int, tmp_path: Path) -> None:
    model = reference(case.write(tmp_path, spelling))
    assert_same_logits(case.name, [model.logits(prompt) for prompt in prompts()])


@pytest.mark.parametrize(("case", "spelling"), SPELLED_ADAPTERS, ids=spelled)
def test_adapters_give_the_logits_of_peft(case: AdapterCase, spelling: int, tmp_path: Path) -> None:
    base = MODELS[case.model]
    adapter = case.write(tmp_path / "adapter", base.config, spelling)
    model = reference(base.write(tmp_path / "base"), adapter)
    assert_same_logits(case.name, [model.logits(prompt) for prompt in prompts()])


@pytest.mark.parametrize("name", SAVED)
def test_folders_of_save_pretrained_give_the_logits_of_transformers_and_peft(name: str) -> None:
    model = reference(*saved_folders(name))
    assert_same_logits(name, [model.logits(prompt) for prompt in prompts()])


@pytest.mark.parametrize("case", ADAPTER_CASES, ids=spelled)
def test_every_adapter_differs_from_its_base_model(case: AdapterCase) -> None:
    assert difference(case.name, case.model) > 0.1


@pytest.mark.parametrize("name", [case.name for case in MODEL_CASES if case.name.startswith("rope-")])
def test_every_rope_differs_from_the_plain_one(name: str) -> None:
    assert difference(name, "t0") > 0.1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rank-stabilised", "not-rank-stabilised"),
        ("patterns", "patterns-swapped"),
        ("tied-with-other-head", "tied"),
        ("attention-bias", "all-biases"),
        ("attention-bias", "t0"),
        ("rope-yarn", "rope-yarn-mscale"),
        ("theta", "t0"),
    ],
)
def test_cases_that_a_lost_option_would_make_equal_are_different(one: str, other: str) -> None:
    assert difference(one, other) > 0.1


@pytest.mark.parametrize("case", MODEL_CASES, ids=spelled)
def test_engine_serves_all_adapters_of_a_model_in_one_batch(case: ModelCase, tmp_path: Path) -> None:
    """Base rows among them must stay untouched, and every answer is that of its own adapter."""
    engine = Engine.from_pretrained(case.write(tmp_path / "base"), EngineConfig(pool_pages=6000, poison=True))
    names = [each.name for each in ADAPTER_CASES if each.model == case.name]
    for each in ADAPTER_CASES:
        if each.name in names:
            engine.add_adapter(each.name, each.write(tmp_path / each.name, case.config))
    served = [(adapter, prompt) for adapter in (None, *names) for prompt in prompts()]
    done = engine.generate([prompt for _, prompt in served], DECIDES, [adapter for adapter, _ in served])
    for start, name in zip(range(0, len(done), len(PROMPT_LENGTHS)), (case.name, *names), strict=True):
        answers = done[start : start + len(PROMPT_LENGTHS)]
        assert_same_logits(name, [np.stack(answer.logits) for answer in answers])
        for row, answer in enumerate(answers):
            assert_same_tokens(name, row, list(answer.token_ids))


@pytest.mark.parametrize("name", SAVED)
def test_engine_serves_folders_of_save_pretrained(name: str) -> None:
    model, adapter = saved_folders(name)
    engine = Engine.from_pretrained(model, EngineConfig(pool_pages=3000, poison=True))
    engine.add_adapter("tuned", adapter)
    answers = engine.generate(prompts(), DECIDES, "tuned")
    assert_same_logits(name, [np.stack(answer.logits) for answer in answers])
    for row, answer in enumerate(answers):
        assert_same_tokens(name, row, list(answer.token_ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_padded_head_are_never_sampled(temperature: float, tmp_path: Path) -> None:
    """A head of 128 rows for 97 tokens, whose padding would win every argmax; the answers are those without it."""
    config = MODELS["t0"].config
    tensors = MODELS["t0"].weights()
    padding = 50 * tensors["lm_head.weight"][:31] + 9
    padded = tensors | {"lm_head.weight": np.concatenate([tensors["lm_head.weight"], padding])}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature, seed=1, logprobs=3)
    answers = []
    for name, stored in (("plain", tensors), ("padded", padded)):
        folder = write_model_folder(tmp_path / name, config, tensors=stored)
        answers.append(Engine.from_pretrained(folder, EngineConfig(pool_pages=2000)).generate(prompts(), params))
    for plain, same in zip(*answers, strict=True):
        assert plain.token_ids == same.token_ids and max(same.token_ids) < 97
        assert all(max(step) < 97 for step in same.logprobs)
    assert (padding @ np.ones(64)).max() > (tensors["lm_head.weight"] @ np.ones(64)).max()
