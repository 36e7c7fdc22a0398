"""All rows of `bench decode`: an engine serves one batch after the other; steps are timed as a client sees them.

In the middle of the output the step's launches are taken and each part of them is captured and timed alone, so parts
are without the host's time; `rest_ms` is what the step takes beyond them: small kernels, gaps, and what a part waits
between the others. LoRA's kernels do: alone each starts before the one before it has ended; in the step each pair waits
for the end of a product of cuBLAS.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slora_ref.bench.decode.cases import MODES, DecodeCase, DecodeOptions
from slora_ref.bench.decode.peft_rows import peft_rows
from slora_ref.bench.machine import matmul_tflops
from slora_ref.config import EngineConfig
from slora_ref.config.presets import preset
from slora_ref.engine import Engine
from slora_ref.engine.leader import GroupExecutor
from slora_ref.errors import ConfigError
from slora_ref.executor import KernelExecutor
from slora_ref.executor.timing import milliseconds
from slora_ref.ops.tape import Part
from slora_ref.request import SamplingParams
from slora_ref.synthetic import write_adapters

Say = Callable[[str], None]
DISTINCT = 16  # weight sets; each name has pages of its own
PARTS: dict[str, tuple[Part, ...]] = {
    "gemm": ("gemm",),
    "lora": ("lora",),
    "attention": ("attention",),
    "communication": ("communication", "lora_communication"),
    "lora_communication": ("lora_communication",),
}
SILENT: tuple[Part, ...] = ("gemm", "lora", "attention", "communication", "rest")  # all but LoRA's messages
HEAD = f"{'mode':>5} {'batch':>5} {'adapters':>8} {'step':>7} {'floor':>6} "
HEAD += f"{'gemm':>6} {'lora':>6} {'attention':>9} {'rest':>6}  ms"


def bench_decode(say: Say, options: DecodeOptions) -> list[dict[str, Any]]:
    """Every case of the options, in every mode; with PEFT its rows last, though it decodes first: see its package.

    Raises:
        ConfigError: there is no GPU, or the model does not fit, or a batch's requests are never all under way.
        BaselineFailed: PEFT could not decode them.
    """
    peft = peft_rows(say, options) if options.peft else []
    config, rows = preset(options.model), []
    with tempfile.TemporaryDirectory(prefix="slora_ref_bench_") as folder:
        sets = write_adapters(Path(folder), config, options.kind, DISTINCT, seed=0)
        for mode in options.modes:
            engine = _open(options, mode)
            tflops = matmul_tflops()
            for name in range(max(options.adapters)):
                engine.add_adapter(str(name), sets[name % DISTINCT])
            say(HEAD)
            for case in options.cases():
                rows.append(measure(engine, case, options, tflops, mode))
                say(line(rows[-1]))
            del engine
            gc.collect()  # its pool took all of the GPU's memory
    return rows + peft


def _open(options: DecodeOptions, mode: str) -> Engine:
    config = preset(options.model)
    return Engine.from_config(
        config,
        EngineConfig(
            device="cuda",
            dtype=options.dtype,
            shards=options.shards,
            max_running=max(options.batches),
            max_batched_tokens=2048,
            max_length=options.prompt + options.output,
            max_adapters=512,
            host_bytes=max(1 << 20, 2 * options.kind.folder_bytes(config, DISTINCT)),
            enforce_eager=mode == "eager",
            overlap_lora=options.overlap_lora,
        ),
    )


def measure(
    engine: Engine, case: DecodeCase, options: DecodeOptions, tflops: float, mode: str = MODES[0]
) -> dict[str, Any]:
    """Serves one batch to the end; `mode` is the engine's. Its adapters come first, so that no request joins late."""
    params = SamplingParams(max_tokens=options.output, ignore_eos=True)
    vocab = case.config.vocab_size
    names = [str(i % case.adapters) if case.adapters else None for i in range(case.batch)]
    engine.generate([[0]] * case.batch, SamplingParams(max_tokens=1), names)
    for i, name in enumerate(names):
        engine.add_request([(31 * i + 7 * j) % vocab for j in range(options.prompt)], params, name)
    times: list[float] = []
    parts: dict[str, float] = {}
    while engine.has_work:
        running = engine.scheduler.running
        decodes = len(running) == case.batch and all(sequence.output_ids for sequence in running)
        started = time.perf_counter()
        engine.step()
        if decodes:
            times.append(1e3 * (time.perf_counter() - started))
        if len(times) == options.output // 2 and not parts:
            parts = _parts(engine)
    if not parts:
        raise ConfigError(
            f"all {case.batch} requests decoded together in {len(times)} steps, fewer than half of --output "
            f"{options.output}: the first ones end before the last ones begin; give more tokens"
        )
    step, (gemm, lora, attention, communication, of_lora) = statistics.median(times), (parts[name] for name in PARTS)
    return {
        "system": "slora_ref",
        **options.describe(case),
        "mode": mode,
        "step_ms": step,
        "floor_ms": case.floor_ms(tflops),
        "gemm_ms": gemm,
        "lora_ms": lora,
        "attention_ms": attention,
        "communication_ms": communication,
        "lora_communication_ms": of_lora,
        "rest_ms": step - gemm - lora - attention - communication,
        "kernels_ms": parts["all"],
        "kernels_without_lora_communication_ms": parts["silent"],
        "step_p99_ms": sorted(times)[int(0.99 * (len(times) - 1))],
        "part_floors": {name: asdict(floor) for name, floor in case.floors(tflops).items()},
    }


def _parts(engine: Engine) -> dict[str, float]:
    """Milliseconds of each part of the last step, and of all its launches together, each as one graph."""
    executor = engine.executor
    assert isinstance(executor, KernelExecutor | GroupExecutor)
    split = isinstance(executor, GroupExecutor)
    time = executor.milliseconds if isinstance(executor, GroupExecutor) else partial(milliseconds, executor)
    parts = {name: time(kinds) for name, kinds in PARTS.items()} | {"all": time()}
    return parts | {"silent": time(SILENT) if split else parts["all"]}


def line(row: dict[str, Any]) -> str:
    """A row as the table shows it."""
    parts = f"{row['gemm_ms']:6.2f} {row['lora_ms']:6.2f} {row['attention_ms']:9.2f} {row['rest_ms']:6.2f}"
    return f"{row['mode']:>5} {row['batch']:5} {row['adapters']:8} {row['step_ms']:7.2f} {row['floor_ms']:6.2f} {parts}"
