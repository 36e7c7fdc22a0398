"""Makes tests/golden with transformers and peft: the logits and greedy tokens that slora_ref must reproduce.

    pip install -e .[oracle,test] && python tests/make_golden.py [NAME ...]

Runs every spelling of every case (tests/golden/cases.py) that transformers or peft can read, insists that the spellings
of a case agree, and writes one NAME.npz a case: logits_N [N, vocab] float32 for each prompt of N tokens, tokens
[prompts, 16] chosen greedily, gaps [prompts, 16] between the best two logits. Also saves, with save_pretrained, the
folders of tests/golden/saved, and notes versions and digests of weights in manifest.json. rope.npz holds transformers'
inv_freq for the ropes of golden/cases.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from golden.cases import (  # noqa: E402
    ADAPTER_CASES,
    FOLDER,
    MODEL_CASES,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    ROPES,
    SAVED,
    AdapterCase,
    ModelCase,
    prompts,
    sha256,
)
from tiny import config_json, tiny_config  # noqa: E402

SPREAD = 2e-6  # spellings of one case agree to this part of the largest logit


def load_model(folder: Path) -> Any:
    """The checkpoint in float32, as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def all_logits(model: Any, ids: list[int]) -> np.ndarray:
    """[tokens, vocab] of one text, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def answers(model: Any) -> dict[str, np.ndarray]:
    """Logits of the prompts, and 16 greedy tokens after each with the gap between the best two logits."""
    logits = [all_logits(model, prompt) for prompt in prompts()]
    shape = (len(logits), NEW_TOKENS)
    tokens, gaps = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, (prompt, last) in enumerate(zip(prompts(), (each[-1] for each in logits), strict=True)):
        ids = list(prompt)
        for step in range(NEW_TOKENS):
            second, best = np.sort(last)[-2:]
            tokens[row, step], gaps[row, step] = last.argmax(), best - second
            ids.append(int(last.argmax()))
            last = all_logits(model, ids)[-1]
    named = {f"logits_{length}": each for length, each in zip(PROMPT_LENGTHS, logits, strict=True)}
    return named | {"tokens": tokens, "gaps": gaps}


def check_agrees(name: str, wanted: np.ndarray, model: Any) -> None:
    """Raises SystemExit when another spelling gives other logits: then it is not the same case."""
    error = abs(all_logits(model, prompts()[-1]) - wanted).max() / abs(wanted).max()
    if error > SPREAD:
        raise SystemExit(f"{name}: spellings differ by {error}")


def run_model(case: ModelCase, work: Path) -> dict[str, np.ndarray]:
    """The answers of a model case; every spelling is loaded."""
    result = answers(load_model(case.write(work / case.name)))
    for i in range(1, len(case.spellings)):
        folder = case.write(work / f"{case.name}-{i}", i)
        check_agrees(f"{case.name}[{i}]", result[f"logits_{PROMPT_LENGTHS[-1]}"], load_model(folder))
    return result


def run_adapter(case: AdapterCase, work: Path) -> dict[str, np.ndarray]:
    """The answers of an adapter case; every spelling that peft reads is loaded."""
    base = next(model for model in MODEL_CASES if model.name == case.model)
    folder = base.write(work / f"{case.name}-base")
    result: dict[str, np.ndarray] = {}
    for i in range(len(case.spellings)):
        adapter = case.write(work / f"{case.name}-{i}", base.config, i)
        model = peft.PeftModel.from_pretrained(load_model(folder), str(adapter)).eval()
        if i == 0:
            result = answers(model)
        check_agrees(f"{case.name}[{i}]", result[f"logits_{PROMPT_LENGTHS[-1]}"], model)
    return result


def save_folder(name: str, work: Path) -> dict[str, np.ndarray]:
    """Write tests/golden/saved/NAME and NAME-adapter with save_pretrained, and return the answers with the adapter."""
    torch.manual_seed(SAVED.index(name))
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 95,
        "eos_token_id": [96, 5],
    }
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    config = {
        "llama-shards": transformers.LlamaConfig(**sizes, rope_parameters=rope, initializer_range=0.2),
        "mistral-tied": transformers.MistralConfig(
            **sizes, sliding_window=None, tie_word_embeddings=True, initializer_range=0.2
        ),
        "llama-bfloat16": transformers.LlamaConfig(**sizes, attention_bias=True, head_dim=32, initializer_range=0.2),
    }[name]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        use_rslora=name == "llama-shards",
        target_modules="all-linear" if name != "mistral-tied" else ["q_proj", "down_proj"],
        rank_pattern={"v_proj": 7} if name == "llama-bfloat16" else {},
        init_lora_weights=False,
    )
    folder = FOLDER / "saved" / name
    model = model.to(torch.bfloat16 if name == "llama-bfloat16" else torch.float16)
    model.save_pretrained(folder, max_shard_size="60KB" if name == "llama-shards" else "5GB")
    tuned = peft.get_peft_model(load_model(folder), lora)
    tuned.peft_config["default"].base_model_name_or_path = name
    tuned.save_pretrained(str(folder) + "-adapter")
    (Path(str(folder) + "-adapter") / "README.md").unlink(missing_ok=True)
    return answers(peft.PeftModel.from_pretrained(load_model(folder), str(folder) + "-adapter").eval())


def rope_frequencies() -> dict[str, np.ndarray]:
    """inv_freq [head_dim / 2] of each rope and head_dim, as transformers rounds it."""
    found = {}
    for name, (head_dim, rope) in ROPES.items():
        config = transformers.LlamaConfig(**config_json(tiny_config(head_dim=head_dim, rope=rope)))
        found[name] = LlamaRotaryEmbedding(config).inv_freq.numpy()
    return found


def main(chosen: list[str]) -> None:
    """Make the chosen cases, or all."""
    torch.set_num_threads(1)
    manifest_path = FOLDER / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    versions = {module.__name__: module.__version__ for module in (transformers, peft, torch, np)}
    with tempfile.TemporaryDirectory() as work:
        for case in (*MODEL_CASES, *ADAPTER_CASES, *SAVED):
            name = case if isinstance(case, str) else case.name
            if chosen and name not in chosen:
                continue
            run = save_folder if isinstance(case, str) else run_model if isinstance(case, ModelCase) else run_adapter
            result = run(case, Path(work))
            np.savez_compressed(FOLDER / f"{name}.npz", **result)
            entry = {"versions": versions}
            if isinstance(case, ModelCase):
                entry["sha256"] = sha256(case.weights())
            manifest[name] = entry
            print(name, f"largest logit {abs(result['logits_150']).max():.2f}", flush=True)
    if not chosen or "rope" in chosen:
        np.savez_compressed(FOLDER / "rope.npz", **rope_frequencies())
        manifest["rope"] = {"versions": versions}
    manifest_path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
