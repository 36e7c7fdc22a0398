"""On a machine with a GPU: every kind of model, adapter and traffic that the demo at scale can be told, each once.

    python tests/gpu/check_demo.py LOG

Each is a process of its own, as a user starts it; a line says what came of it, and LOG gets the same lines. Exit code 1
if a check failed. The real folder has SmolLM2's shape and random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
SEVEN = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
CASES = (
    "--model llama-13b --adapters 200 --distinct 8 --requests 64 --checked 2",
    f"--model llama-7b --adapters 200 --distinct 8 --ranks 64,32,16,8 --targets {SEVEN} --requests 64 --checked 4",
    "--model llama-7b --adapters 200 --distinct 8 --rate 20 --requests 64 --checked 2",
    "--model llama-7b --adapters 200 --distinct 8 --dtype bfloat16 --requests 64 --checked 2",
    "--model FOLDER --adapters 2000 --requests 200",
    "--model FOLDER --adapters 200 --dtype bfloat16 --ranks 16,4 --targets q_proj,down_proj --requests 64 --checked 2",
)


def main(log: Path) -> int:
    """Runs all; 1 if one failed."""
    from tiny import tiny_config, write_model_folder

    lines, worst = [], 0
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(folder, tiny_config(**SMOLLM2), dtype="bfloat16")
        for case in CASES:
            code, line = run(case, folder)
            lines.append(line)
            print(line, flush=True)
            worst = max(worst, code)
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(worst > 0)


def run(case: str, folder: str) -> tuple[int, str]:
    """One process; its exit code, and what it says in short."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "slora_ref", "demo", "--device", "cuda", "--json"]
    done = subprocess.run([*command, *case.replace("FOLDER", folder).split()], capture_output=True, text=True)
    said = f"{case}: exit code {done.returncode} after {time.perf_counter() - started:.0f} s; "
    if not done.stdout:
        return done.returncode, said + done.stderr.strip().splitlines()[-1]
    report = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, said + (
        f"first token after {report['first_ready_s']:.1f} s; {report['finished']} of {report['requests']} finished, "
        f"{report['tokens_per_s']:,.0f} tokens/s; {report['correct']} of {report['checked']} right, "
        f"{report['adapter_tokens']} of {report['checked_tokens']} tokens by adapters, "
        f"largest logit error {report['max_relative_error']:.2%}"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
