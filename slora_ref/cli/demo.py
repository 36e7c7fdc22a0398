"""`slora-ref demo`: serve a burst of requests over thousands of adapters and check every answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.cli.shards import add_shard_options, run_sharded
from slora_ref.demo import DemoOptions, run_demo


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    defaults = DemoOptions()
    parser = commands.add_parser(
        "demo",
        help="serve thousands of adapters from one page pool and check every answer",
        description="Registers many adapters of the toy model that comes with slora_ref, sends a burst to a "
        "pool that holds a few dozen, and checks each answer against the dense model with that adapter merged.",
    )
    default = "(default: %(default)s)"
    parser.add_argument("--adapters", type=int, default=defaults.adapters, help=f"adapters to register {default}")
    parser.add_argument("--requests", type=int, default=defaults.requests, help=f"requests to send {default}")
    parser.add_argument("--pool-pages", type=int, default=defaults.pool_pages, help=f"pages of the pool {default}")
    parser.add_argument("--seed", type=int, default=defaults.seed, help=f"of words, popularity and arrivals {default}")
    parser.add_argument("--rate", type=float, help="requests a second; without it, all come at once")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help=f"where the model runs {default}")
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], default=defaults.dtype, help=f"of all numbers {default}"
    )
    add_shard_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the pool (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=lambda args: run_sharded(args, run))


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if a check failed: an answer, the share right by the rule, or the largest logit error."""
    options = DemoOptions(
        adapters=args.adapters,
        requests=args.requests,
        pool_pages=args.pool_pages,
        seed=args.seed,
        rate=args.rate,
        dtype=args.dtype,
        shards=args.shards,
        communicator=args.communicator,
    )
    screen = Screen(args.json)
    report = run_demo(options, screen.say, screen.live, args.plot)
    screen.clear()
    if args.json:
        print_json(report.as_json())
    else:
        screen.say(report.table())
    return 1 if report.failed else 0
