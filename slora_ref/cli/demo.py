"""`slora-ref demo`: serve a burst of requests over thousands of adapters and check every answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.demo import DemoOptions, run_demo


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    defaults = DemoOptions()
    parser = commands.add_parser(
        "demo",
        help="serve thousands of adapters from one page pool and check every answer",
        description="Registers many adapters of the toy model that comes with slora_ref, sends a burst to a "
        "pool that holds a few dozen, and checks each answer against the dense model with that adapter merged.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--adapters", type=int, default=defaults.adapters, help="adapters to register")
    parser.add_argument("--requests", type=int, default=defaults.requests, help="requests to send")
    parser.add_argument("--pool-pages", type=int, default=defaults.pool_pages, help="pages of the pool")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of words, popularity and arrivals")
    parser.add_argument("--rate", type=float, help="requests a second; without it, all come at once")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where the model runs")
    parser.add_argument("--dtype", choices=["float32", "float64"], default=defaults.dtype, help="of all numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the pool (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if an answer is wrong."""
    options = DemoOptions(
        adapters=args.adapters,
        requests=args.requests,
        pool_pages=args.pool_pages,
        seed=args.seed,
        rate=args.rate,
        dtype=args.dtype,
    )
    screen = Screen(args.json)
    report = run_demo(options, screen.say, screen.draw if screen.is_terminal else None, args.plot)
    if args.json:
        print_json(report.as_json())
    else:
        screen.say(report.table())
    return 1 if report.wrong else 0
