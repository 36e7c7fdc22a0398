"""`slora-ref bench host`: what a step costs on the host beside the model."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from typing import Any

from slora_ref.bench import bench_host, machine_facts
from slora_ref.cli.output import Screen, Subparsers, print_json

BENCHES: dict[str, Callable[[Callable[[str], None]], list[dict[str, Any]]]] = {"host": bench_host}


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "bench", help="measure, with machine and versions", description="host: scheduling a step"
    )
    parser.add_argument(
        "what", choices=list(BENCHES), help="host: policy, scheduler, allocator and tables, without a model"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    rows = BENCHES[args.what](Screen(args.json).say)
    if args.json:
        print_json(
            {
                "bench": args.what,
                "command": f"slora-ref bench {args.what} --json",
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": machine_facts(),
                "rows": rows,
            }
        )
    return 0
