"""`slora-ref demo`: serve a burst of requests over thousands of adapters and check the answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.cli.shards import add_shard_options, run_sharded
from slora_ref.cli.values import numbers, words
from slora_ref.config.engine import DTYPES
from slora_ref.config.presets import PRESETS
from slora_ref.demo import DemoOptions, run_demo
from slora_ref.demo.scale import ScaleOptions, run_scale_demo
from slora_ref.errors import ConfigError
from slora_ref.synthetic import AdapterKind

OF_SCALE = ("ranks", "targets", "distinct", "memory_fraction", "checked")  # options that the toy demo has not


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    defaults, scale = DemoOptions(), ScaleOptions()
    parser = commands.add_parser(
        "demo",
        help="serve thousands of adapters from one page pool and check the answers",
        description="Registers many adapters of the toy model that comes with slora_ref, sends a burst to a "
        "pool that holds a few dozen, and checks each answer against the dense model with that adapter merged. "
        "With --model: a large model on GPUs, synthetic adapters, the paper's workload, and a sample checked.",
    )
    default = "(default: %(default)s)"
    parser.add_argument("--adapters", type=int, default=defaults.adapters, help=f"adapters to register {default}")
    parser.add_argument(
        "--requests", type=int, help=f"requests to send (default: {defaults.requests}; with --model {scale.requests})"
    )
    parser.add_argument(
        "--pool-pages", type=int, help=f"pages of the pool (default: {defaults.pool_pages}; with --model all that fit)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help=f"of words, popularity and arrivals {default}")
    parser.add_argument("--rate", type=float, help="requests a second; without it, all come at once")
    parser.add_argument("--device", choices=list(DTYPES), default="cpu", help=f"where the model runs {default}")
    dtypes = sorted({dtype for each in DTYPES.values() for dtype in each})
    parser.add_argument("--dtype", choices=dtypes, help="of all numbers (default: float32; on a GPU float16)")
    add_shard_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the pool (needs the extra `plots`)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    large = parser.add_argument_group("a large model, usually on GPUs")
    shapes = f"{', '.join(PRESETS)} (random weights; needs a GPU), or a checkpoint folder"
    large.add_argument("--model", metavar="NAME", help=shapes)
    large.add_argument("--ranks", type=numbers, metavar="LIST", help="of the adapters, in turn (default: 8)")
    large.add_argument("--targets", type=words, metavar="LIST", help="default: q_proj,k_proj,v_proj,o_proj")
    large.add_argument("--distinct", type=int, help=f"weight sets that names share (default: {scale.distinct})")
    large.add_argument("--memory-fraction", type=float, help="of the GPU's memory to take (default: 0.9)")
    large.add_argument("--checked", type=int, help=f"answers to check against dense weights (default: {scale.checked})")
    parser.set_defaults(run=lambda args: run_sharded(args, run))


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if a check failed."""
    screen = Screen(args.json)
    if args.model is None:
        report: Any = run_demo(_toy(args), screen.say, screen.live, args.plot)
    else:
        report = run_scale_demo(_scale(args), screen.say, screen.live)
    screen.clear()
    if args.json:
        print_json(report.as_json())
    else:
        screen.say(report.table())
    return 1 if report.failed else 0


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, by name; the others keep their defaults."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _toy(args: argparse.Namespace) -> DemoOptions:
    for name in _given(args, *OF_SCALE):
        raise ConfigError(f"--{name.replace('_', '-')} needs --model: the toy model's adapters are what they are")
    dtype = args.dtype or DTYPES[args.device][0]
    if dtype not in DTYPES[args.device]:
        raise ConfigError(f"dtype is {dtype!r}; on {args.device} it can be {' or '.join(DTYPES[args.device])}")
    options = _given(args, "adapters", "requests", "pool_pages", "seed", "rate", "shards", "communicator")
    return DemoOptions(device=args.device, dtype=dtype, **options)


def _scale(args: argparse.Namespace) -> ScaleOptions:
    if args.plot is not None:
        raise ConfigError("--plot draws the toy demo's pool; leave --model or --plot out")
    kind = AdapterKind(**_given(args, "ranks", "targets"))
    names = "adapters requests pool_pages seed rate distinct memory_fraction checked shards communicator".split()
    dtype = args.dtype or DTYPES[args.device][0]
    return ScaleOptions(model=args.model, kind=kind, device=args.device, dtype=dtype, **_given(args, *names))
