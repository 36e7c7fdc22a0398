"""Fills the generated parts of README.md: `python tests/readme.py`; --check only says whether they are up to date.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. test_readme.py checks all of them; in the
demo's output, times and rates are masked for that, since they are another machine's.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slora_ref.demo import DemoOptions, run_demo
from slora_ref.demo.report import DENSE
from slora_ref.toy import TASKS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "tutorials" / "figures" / "pool.svg"
RESULTS = ROOT / "slora_ref" / "bench" / "results"
CHAPTERS = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))


def demo_output() -> str:
    """The last part of what `make demo` prints; draws the picture of the pool on the way."""
    report = run_demo(DemoOptions(), print, plot=PICTURE)
    table = report.table()
    return "```\n" + table[table.index("What happened") : table.index(DENSE)].rstrip() + "\n```"


def example() -> str:
    """The README's own Python block."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1, "README.md must have one block of Python"
    return str(found[0])


def example_output() -> str:
    """What the README's Python block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example(), "README.md", "exec"), {"__name__": "readme_example"})
    return "prints\n```\n" + printed.getvalue().rstrip() + "\n```"


def measured(name: str) -> dict[str, Any]:
    """A committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def host_table() -> str:
    """The committed measurement of the host's work."""
    result = measured("HOST-CPU")
    rows = ["| host work, without the model | size | median |", "| --- | --- | ---: |"]
    allocations = [row for row in result["rows"] if row["operation"] == "allocate"]
    pages, pools = allocations[0]["pages"], ", ".join(f"{row['pool_pages']:,}" for row in allocations)
    times = ", ".join(f"{row['us']:.1f}" for row in allocations)
    rows.append(f"| allocate {pages:,} pages | pools of {pools} pages | {times} us |")
    for row in result["rows"]:
        if row["operation"] == "step":
            size = f"{row['running']:.0f} running, {row['adapters']:,} adapters registered, {row['asked']:,} asked for"
            size += f", {row['pool_pages']:,} pages"
            rows.append(f"| policy, scheduler, allocator, tables: one step | {size} | {row['us']:.0f} us |")
    return "\n".join([*rows, "", measured_by(result)])


def peers_table() -> str:
    """The committed comparison with transformers and peft on a real model."""
    result = measured("SMOLLM2-CPU")
    [row], machine = result["rows"], result["machine"]
    size = f"{row['requests']} requests, prompt {row['prompt']}, {row['new_tokens']} new tokens"
    peft, transformers = f"peft {machine['peft']}", f"transformers {machine['transformers']}"
    lines = [
        f"| SmolLM2-135M, float32, {row['threads']} threads: {size} | tokens/s | the same in | tokens/s | ratio |",
        "| --- | ---: | --- | ---: | ---: |",
        f"| {row['adapters']} adapters of ranks {row['ranks'][0]} to {row['ranks'][-1]}, all seven targets "
        f"| {row['tokens_per_s']:.0f} | {peft}, mixed batch | {row['peft_tokens_per_s']:.0f} "
        f"| {row['ratio_to_peft']:.2f} |",
        f"| no adapter | {row['base_tokens_per_s']:.0f} | {transformers} | {row['transformers_tokens_per_s']:.0f} "
        f"| {row['ratio_to_transformers']:.2f} |",
    ]
    return "\n".join([*lines, "", measured_by(result)])


def headline() -> str:
    """What the measurements on a GPU come to, for a reader who has a minute."""
    decode, serve, peer = measured("DECODE-H200"), measured("SERVE-H200"), measured("VLLM-H200")
    steps = [row for row in own_rows(decode) if (row["batch"], row["mode"]) == (128, "graph")]
    step = {row["adapters"]: row["step_ms"] for row in steps}
    few, many = ([row["requests_per_s"] for row in own_rows(serve) if row["registered"] == n] for n in (200, 2000))
    theirs = {row["adapters"]: row["step_ms"] for row in peer["decode"] if row["batch"] == 128}
    served = next(row["requests_per_s"] for row in peer["serve"] if (row["adapters"], row["ranks"]) == (200, [8]))
    return "\n".join(
        [
            f"**Measured** with Llama-7B on one {decode['machine']['gpu']}: {serve['rows'][0]['requests']:,} requests "
            f"over 200 adapters at {few[-1]:.1f} requests/s,",
            f"{few[0]:.1f} in the first run after the start ({peer['engine']}: {served:.1f}); over {2000:,} at "
            f"{many[-1]:.1f}. A decode step of 128 requests takes {step[0]:.1f} ms",
            f"without adapters, {step[128]:.1f} ms with 128 different ones (vLLM: {theirs[0]:.1f} and "
            f"{theirs[128]:.1f}). [All tables](#measured)",
        ]
    )


def gpu_tables() -> str:
    """The committed measurements on a GPU: a decode step, a burst of requests over few and many adapters, kernels."""
    decode, peer = measured("DECODE-H200"), measured("VLLM-H200")
    lines = [*decode_lines(decode, peer), "", measured_by(decode), ""]
    lines += [*serve_lines(peer, "SERVE-H200", "SERVE-RANKS-H200"), ""]
    lines += [*load_lines("SERVE-FEW-MANY-H200", "SERVE-RATE-H200", "SERVE-10000-H200"), ""]
    return "\n".join([*lines, *start_lines(), "", *shard_lines(), "", *kernel_lines()])


def load_lines(*names: str) -> list[str]:
    """What few and many registered adapters cost, and how the loads went."""
    results = [measured(name) for name in names]
    lines = [
        "| Llama-7B, few and many adapters registered | requests/s | loads | GB/s | of the link | hidden "
        "| waited for its adapter, p99 |",
        f"| --- |{' ---: |' * 6}",
    ]
    for row in [row for result in results for row in own_rows(result)]:
        come = f"{row['rate']:g} requests a second" if row["rate"] else "all at once"
        who = f"{row['registered']:,}, {row['popularity']} popularity, {row['requests']:,} requests, {come}"
        rate = f"{row['gb_s']:.1f} | {row['gb_s'] / row['link_gb_s']:.0%} | {row['hidden_fraction']:.1%}"
        waits = f"{row['waiting_steps_p99']:.0f} step(s)"
        lines.append(f"| {who} | {row['requests_per_s']:.1f} | {row['loads']:,} | {rate} | {waits} |")
    said = "The first row of each run is the first after the start. Folders are read from the system's page cache."
    return [*lines, "", "\n\n".join(map(measured_by, results)), "", said]


def start_lines() -> list[str]:
    """From the start of the process to the first token, part by part."""
    result = measured("START-H200")
    parts = list(result["rows"][0]["start_s"])
    lines = [f"| Llama-7B's first token after, in s | {' | '.join(['all', *parts])} |"]
    lines.append(f"| --- |{' ---: |' * (len(parts) + 1)}")
    for row in result["rows"]:
        cells = [f"{row['first_ready_s']:.1f}", *(f"{row['start_s'][part]:.1f}" for part in parts)]
        lines.append(f"| kernels {'kept' if row['kernels_cached'] else 'compiled'} | {' | '.join(cells)} |")
    runs = (measured_by(result | {"command": row["command"]}) for row in result["rows"])
    return [*lines, "", "\n\n".join(runs)]


def shard_lines() -> list[str]:
    """A decode step of large models on one GPU and on two."""
    result = measured("SHARDS-H200")
    found = {(row["model"], row["shards"], row["adapters"]): row for row in result["rows"]}
    batch, adapters = result["rows"][-1]["batch"], result["rows"][-1]["adapters"]
    titles = ["one GPU", "two", "ratio", "of it LoRA's messages", "without adapters: one GPU", "two", "ratio"]
    lines = [f"| float16, a decode step of {batch} requests, in ms | {' | '.join(titles)} |"]
    lines.append(f"| --- |{' ---: |' * len(titles)}")
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        one, two = (found[model, shards, adapters] for shards in (1, 2))
        base = [found[model, shards, 0]["step_ms"] for shards in (1, 2)]
        messages = (two["kernels_ms"] - two["kernels_without_lora_communication_ms"]) / two["step_ms"]
        steps = [one["step_ms"], two["step_ms"]]
        cells = [f"{model}, {adapters} adapters of rank {one['rank']}", *(f"{step:.2f}" for step in steps)]
        cells += [f"{steps[0] / steps[1]:.2f}", f"{messages:.1%}"]
        cells += [*(f"{step:.2f}" for step in base), f"{base[0] / base[1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", measured_by(result).replace("on one ", "on one and two ")]


SHOWN_LORA = (("distinct", 64, 8), ("distinct", 64, 64), ("zipf", 256, 64), ("prefill", 4096, 16))
SHOWN_ATTENTION = (("attention_decode", 64, 512), ("attention_decode", 64, 2048), ("attention_prefill", 16, 512))
LIBRARIES = {"cublas_batched_padded": "padded cuBLAS", "cublas_grouped": "grouped cuBLAS", "torch_sdpa": "torch SDPA"}


def kernel_lines() -> list[str]:
    """The operations that read pages, beside libraries on contiguous arrays; a case's first row is Llama-7B's."""
    result = measured("KERNELS-H200")
    lora: dict[Any, Any] = {}
    attention: dict[Any, Any] = {}
    for row in result["rows"]:
        if row["operation"] == "lora":
            lora.setdefault((row["case"], row["rows"], row["rank"]), row)
        elif row["operation"] == "attention":
            attention.setdefault((row["case"], row["batch"], row["context"]), row)
    lines = [
        "| an operation on pages, float16, in us | time | floor | libraries, on contiguous copies |",
        "| --- | ---: | ---: | --- |",
    ]
    for case, rows, rank in SHOWN_LORA:
        row = lora[case, rows, rank]
        name = f"xAB of one projection, {case}: {rows:,} rows, {row['adapters']} adapters of rank {rank}"
        lines.append(kernel_line(name, row))
    for case, batch, context in SHOWN_ATTENTION:
        name = f"{case.removeprefix('attention_')} attention: {batch} sequences of {context:,} tokens"
        lines.append(kernel_line(name, attention[case, batch, context]))
    return [*lines, "", measured_by(result)]


def kernel_line(name: str, row: dict[str, Any]) -> str:
    """A row of the table of kernels."""
    theirs = ", ".join(f"{LIBRARIES[key]} {us:.1f}" for key, us in row["baselines"].items() if us is not None)
    return f"| {name} | {row['us']:.1f} | {row['floor_us']:.1f} | {theirs} |"


def own_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine's rows of a result; of those from before PEFT was measured in the same run, all."""
    return [row for row in result["rows"] if row.get("system", "slora_ref") == "slora_ref"]


def peft_rows(*results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of PEFT, measured in the same runs."""
    return [row for result in results for row in result["rows"] if row not in own_rows(result)]


def peft_names(rows: list[dict[str, Any]]) -> list[str]:
    """The head of PEFT's column, if it has one."""
    return [f"PEFT {rows[0]['versions']['peft']}"] if rows else []


def decode_lines(decode: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    """A decode step as the engine takes it, beside single launches, its floor, its parts, vLLM and PEFT."""
    steps = {(row["mode"], row["batch"], row["adapters"]): row for row in own_rows(decode)}
    peft = peft_rows(decode)
    found = [peer["decode"], peft] if peft else [peer["decode"]]
    others = [{(row["batch"], row["adapters"]): f"{row['step_ms']:.1f}" for row in rows} for rows in found]
    keys = ("floor_ms", "gemm_ms", "lora_ms", "attention_ms", "rest_ms")
    titles = ["step", "without graphs", "its floor", "GEMM", "LoRA", "attention", "other", peer["engine"]]
    titles += peft_names(peft)
    lines = [f"| Llama-7B, float16, a decode step, in ms | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for (mode, batch, adapters), row in steps.items():
        if mode == "graph" and adapters in (0, batch):
            who = f"{adapters} adapter{'s' * (adapters > 1)} of rank {row['rank']}" if adapters else "no adapter"
            times = [row["step_ms"], steps["eager", batch, adapters]["step_ms"], *(row[key] for key in keys)]
            cells = [f"{batch} request{'s' * (batch > 1)}, {who}", *(f"{time:.2f}" for time in times)]
            cells += [steps_ms.get((batch, adapters), "") for steps_ms in others]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def serve_lines(peer: dict[str, Any], *names: str) -> list[str]:
    """A burst of requests, over few and many adapters, of one rank and of several."""
    results = [measured(name) for name in names]
    theirs = {(row["adapters"], *row["ranks"]): row["requests_per_s"] for row in peer["serve"]}
    peft = peft_rows(*results)
    peft_speeds = {(row["registered"], *row["ranks"]): f"{row['requests_per_s']:.1f}" for row in peft}
    titles = ["requests/s", "floor", peer["engine"], *peft_names(peft)]
    titles += ["tokens/s", "no step on the GPU", "loads", "waited for its adapter, p99"]
    lines = [
        f"| Llama-7B, 1,000 requests at once, 8 to 512 tokens each way | {' | '.join(titles)} |",
        f"| --- |{' ---: |' * len(titles)}",
    ]
    for result in results:
        for place, row in enumerate(own_rows(result)):
            case, ranks = (row["registered"], *row["ranks"]), ", ".join(map(str, row["ranks"]))
            who = f"{row['registered']:,} adapters of rank {ranks}"
            if row["registered"] == 0:
                case, who = (0,), "no adapters"
            first = "" if place else ", the first run after the start"
            speed = [f"{row['requests_per_s']:.1f}", f"{row['floor_requests_per_s']:.1f}", str(theirs.get(case, ""))]
            speed += [peft_speeds.get(case, "")] if peft else []
            lines.append(
                f"| {who}{first} | {' | '.join(speed)} "
                f"| {row['output_tokens_per_s']:,.0f} | {row['idle_fraction']:.1%} "
                f"| {row['loads']:,} | {row['waiting_steps_p99']:.0f} step(s) |"
            )
    return [*lines, "", "\n\n".join(map(measured_by, results))]


def measured_by(result: dict[str, Any]) -> str:
    """The line below a table: command, machine, versions, date."""
    machine = result["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, NumPy {machine['numpy']}"
    if machine["gpu"] is not None:
        where = f"one {machine['gpu']}, CUDA {machine['cuda']}, CuPy {machine['cupy']}"
    return f"(`{result['command']}` on {where}, {result['date']})"


def path() -> str:
    """The chapters of tutorials/ in order."""
    chapters = [(file, importlib.import_module("render").about(file)["Title"]) for file in CHAPTERS]
    links = [f"{int(file.name[:2])} [{title}](tutorials/{file.stem}.md)" for file, title in chapters]
    return "**The paper, step by step**, in [chapters that run](tutorials/README.md) on a laptop: " + " · ".join(links)


def task_list() -> str:
    """The trained adapters of the toy model."""
    return ", ".join(f"{task.name} (rank {task.rank})" for task in TASKS.values())


PARTS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "demo": demo_output,
    "host": host_table,
    "peers": peers_table,
    "gpu": gpu_tables,
    "answers": example_output,
    "tasks": task_list,
    "path": path,
}


def filled(text: str, name: str, content: str) -> str:
    """`text` with the part `name` replaced."""
    part = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    assert len(part.findall(text)) == 1, f"README.md must have the part {name} once"
    return part.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def picture_digest() -> str:
    """What the committed picture says of the numbers that it was drawn from."""
    found = re.findall(r"sha256:[0-9a-f]{64}", PICTURE.read_text(encoding="utf-8"))
    assert len(found) == 1, f"{PICTURE} must name the digest of its numbers once: run python tests/readme.py"
    return str(found[0])


def masked(text: str) -> str:
    """`text` without what depends on the machine's speed."""
    return re.sub(r"[\d,.]+ (ms|s\b|a second)", r"# \1", text)


def main() -> int:
    """Rewrites README.md, or with --check compares."""
    sys.path.insert(0, str(ROOT / "tutorials"))
    old = new = README.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        new = filled(new, name, make())
    if "--check" in sys.argv:
        return int(masked(old) != masked(new))
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
