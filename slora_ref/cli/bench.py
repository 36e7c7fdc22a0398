"""`slora-ref bench WHAT`: measurements, each with the machine and the versions that made it."""

from __future__ import annotations

import argparse
import datetime
import importlib
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

from slora_ref.bench import bench_host, copy_gb_s, machine_facts
from slora_ref.bench.decode.cases import DecodeOptions
from slora_ref.bench.decode.run import bench_decode
from slora_ref.cli.bench_serve import add_kind, add_serving
from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.cli.values import by_default, numbers, words
from slora_ref.config.presets import PRESETS
from slora_ref.engine.devices import check_cuda
from slora_ref.synthetic import AdapterKind

Say = Callable[[str], None]
Rows = list[dict[str, Any]]
Measure = Callable[[Say], Rows]


def add_parser(commands: Subparsers) -> None:
    """Adds the command, and one below it for each measurement."""
    parser = commands.add_parser("bench", help="measure, with machine and versions")
    benches = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _add(benches, "host", "policy, scheduler, allocator and tables, without a model", _host, on_gpu=False)
    _add(benches, "kernels", "the kernels beside their floors and libraries, needs a GPU", _kernels)
    add_serving(benches, _add)
    decode = _add(benches, "decode", "a decode step of a large model, part by part, needs a GPU", _decode)
    defaults, default = DecodeOptions(), "(default: %(default)s)"
    decode.add_argument("--model", choices=list(PRESETS), default=defaults.model, help=f"shape {default}")
    batch = f"requests at a time {by_default(defaults.batches)}"
    decode.add_argument("--batch", type=numbers, default=defaults.batches, metavar="LIST", help=batch)
    distinct = f"distinct ones in a batch {by_default(defaults.adapters)}"
    decode.add_argument("--adapters", type=numbers, default=defaults.adapters, metavar="LIST", help=distinct)
    add_kind(decode.add_argument, defaults.kind)
    decode.add_argument("--prompt", type=int, default=defaults.prompt, help=f"tokens of each prompt {default}")
    decode.add_argument("--output", type=int, default=defaults.output, help=f"tokens of each answer {default}")
    decode.add_argument("--shards", type=int, default=defaults.shards, help=f"GPUs of this host {default}")
    decode.add_argument("--overlap-lora", action="store_true", help="on several GPUs: LoRA's messages beside products")
    decode.add_argument("--dtype", choices=["float16", "bfloat16"], default=defaults.dtype, help=f"numbers {default}")
    decode.add_argument("--peft", action="store_true", help="transformers and PEFT too, if they are installed")
    modes = f"graph, eager or both {by_default(defaults.modes)}"
    decode.add_argument("--mode", type=words, default=defaults.modes, metavar="LIST", help=modes)


def _add(
    benches: Subparsers,
    name: str,
    text: str,
    prepare: Callable[[argparse.Namespace], Measure],
    on_gpu: bool = True,
) -> argparse.ArgumentParser:
    """Adds one measurement; `prepare` checks the values, and what it gives back measures."""
    parser: argparse.ArgumentParser = benches.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run, prepare=prepare, on_gpu=on_gpu)
    return parser


def _host(args: argparse.Namespace) -> Measure:
    return bench_host


def _kernels(args: argparse.Namespace) -> Measure:
    """The module needs CuPy, so it is imported only when asked to run."""
    return lambda say: importlib.import_module("slora_ref.bench.kernels.run").bench_kernels(say)


def _decode(args: argparse.Namespace) -> Measure:
    options = DecodeOptions(
        model=args.model,
        batches=args.batch,
        adapters=args.adapters,
        kind=AdapterKind(args.ranks, args.targets),
        prompt=args.prompt,
        output=args.output,
        dtype=args.dtype,
        shards=args.shards,
        overlap_lora=args.overlap_lora,
        peft=args.peft,
        modes=args.mode,
    )
    return partial(bench_decode, options=options)


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        ConfigError: a value cannot be measured, or the measurement needs a GPU, and there is none or no CuPy.
    """
    measure = args.prepare(args)
    on_gpu = args.on_gpu or getattr(args, "device", "cpu") == "cuda"
    if on_gpu:
        check_cuda()
    screen = Screen(args.json)
    rows = measure(_busy(screen))
    screen.clear()
    if args.json:
        print_json(
            {
                "bench": args.what,
                "command": shlex.join(["slora-ref", *args.argv]),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": machine_facts(on_gpu),
                "copy_gb_s": copy_gb_s() if on_gpu else None,
                "rows": rows,
            }
        )
    return 0


def _busy(screen: Screen) -> Say:
    """`say` with a live line below it, on a terminal: how many lines there are so far, and that it goes on."""
    if screen.live is None:
        return screen.say
    draw, said = screen.live, 0

    def say(line: str) -> None:
        nonlocal said
        screen.say(line)
        said += 1
        draw(lambda columns: f"{said} measured, measuring on ..."[: columns - 1])

    draw(lambda columns: "measuring ..."[: columns - 1])
    return say
