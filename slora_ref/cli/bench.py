"""`slora-ref bench host|kernels`: measurements, each with the machine and the versions that made it."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from slora_ref.bench import bench_host, copy_gb_s, machine_facts
from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.errors import ConfigError

Say = Callable[[str], None]


def bench_kernels(say: Say) -> list[dict[str, Any]]:
    """The LoRA kernels. The module needs CuPy, so it is imported only when asked to run."""
    rows: list[dict[str, Any]] = importlib.import_module("slora_ref.bench.kernels.run").bench_kernels(say)
    return rows


BENCHES: dict[str, Callable[[Say], list[dict[str, Any]]]] = {"host": bench_host, "kernels": bench_kernels}
ON_GPU = ("kernels",)


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure, with machine and versions",
        description="host: scheduling a step; kernels: the LoRA kernels on a GPU",
    )
    parser.add_argument(
        "what",
        choices=list(BENCHES),
        help="host: policy, scheduler, allocator and tables, without a model; kernels: LoRA kernels, needs a GPU",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        ConfigError: the measurement needs CuPy, and it is not installed.
    """
    on_gpu = args.what in ON_GPU
    if on_gpu and importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"bench {args.what} needs a GPU and CuPy: pip install 'slora_ref[cuda12]', or [cuda13]")
    screen = Screen(args.json)
    rows = BENCHES[args.what](_busy(screen))
    screen.clear()
    if args.json:
        print_json(
            {
                "bench": args.what,
                "command": f"slora-ref bench {args.what} --json",
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
