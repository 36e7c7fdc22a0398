"""`slora-ref bench serve|load`: an engine under traffic, on the CPU with the toy or on a GPU with a large model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slora_ref.bench.occupancy import check_plot, plot_occupancy
from slora_ref.bench.serve import ServeOptions, bench_load, bench_serve
from slora_ref.bench.serve.session import Run
from slora_ref.cli.output import Subparsers
from slora_ref.cli.values import by_default, numbers, words
from slora_ref.config.presets import PRESETS
from slora_ref.errors import ConfigError
from slora_ref.prefetch import EVICTIONS
from slora_ref.synthetic import AdapterKind
from slora_ref.tp.split import check_split

Say = Callable[[str], None]
Rows = list[dict[str, Any]]
Measure = Callable[[Say], Rows]
AddBench = Callable[..., argparse.ArgumentParser]
COLUMNS = """waits p99: steps in which there was room for a request, but its adapter was not there yet (99 of 100
requests waited no longer); hits: requests that found their adapter in the pool."""
SERVE_COLUMNS = f"""Columns: of first: throughput beside the first row's; by bytes: the same, if all that is lost were
the time to read more adapters (on a GPU); prepared: the
host's time to prepare the launches of steps whose shape came for the first time (on a GPU); {COLUMNS}"""
LOAD_COLUMNS = f"Columns: hidden: share of the loads' time in which the engine did not stand still for them; {COLUMNS}"
PEFT_S = 60.0


def add_serving(benches: Subparsers, add: AddBench) -> None:
    """Adds both measurements; `add` makes a parser for one."""
    serve = add(benches, "serve", "throughput by number of registered adapters", prepare_serve, on_gpu=False)
    load = add(benches, "load", "loads of adapters by eviction policy, against the link", prepare_load, on_gpu=False)
    for parser in (serve, load):
        _add_options(parser)
    serve.epilog, load.epilog = SERVE_COLUMNS, LOAD_COLUMNS
    load.set_defaults(popularity="zipf", peft=None)
    serve.set_defaults(eviction=EVICTIONS[:1])
    serve.add_argument(
        "--peft",
        type=float,
        nargs="?",
        const=PEFT_S,
        metavar="SECONDS",
        help=f"serve with transformers and PEFT too, for {PEFT_S:g} or so many seconds of each row's traffic",
    )
    serve.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what the pool held in the last run")


def _add_options(parser: argparse.ArgumentParser) -> None:
    defaults, default = ServeOptions(), "(default: %(default)s)"
    add = parser.add_argument
    add("--model", choices=["toy", *PRESETS], default=defaults.model, help=f"the toy, or a shape {default}")
    add("--device", choices=["cpu", "cuda"], default=defaults.device, help=f"where it runs {default}")
    add("--dtype", default=defaults.dtype, help=f"of all numbers {default}")
    registered = "adapters, one row each; 0: the base model alone (default: 5 100 2000 10000)"
    add("--registered", type=numbers, nargs="+", metavar="N", help=registered)
    add("--requests", type=int, default=defaults.requests, help=f"in each run {default}")
    add("--rate", type=float, help="requests a second; without it, all come at once")
    add("--popularity", choices=["uniform", "zipf"], default=defaults.popularity, help=f"of the adapters {default}")
    add_kind(add, defaults.kind)
    add("--distinct", type=int, default=defaults.distinct, help=f"folders that the names share {default}")
    add("--own-copies", action="store_true", help="one entry in host memory for each name, not for each folder")
    add("--host-gb", type=float, default=defaults.host_gb, help=f"host memory for adapters {default}")
    lengths = "tokens of prompts and answers, HIGH left out (default: 8,512, for the toy 8,64)"
    add("--lengths", type=numbers, metavar="LOW,HIGH", help=lengths)
    add("--eviction", type=words, default=EVICTIONS, metavar="LIST", help=f"of idle adapters: {', '.join(EVICTIONS)}")
    add("--prefetch", type=int, default=defaults.prefetch, help=f"adapters loaded ahead at once {default}")
    add("--max-running", type=int, help="requests in a step (default: 128, for the toy 16)")
    add("--max-batched-tokens", type=int, help="rows in a step (default: 2048, for the toy 256)")
    add("--join-every", type=int, default=defaults.join_every, help=f"steps until others may join {default}")
    add("--shards", type=int, default=defaults.shards, help=f"tensor-parallel workers {default}")
    add("--seed", type=int, default=defaults.seed, help=f"of everything that is drawn {default}")


def add_kind(add: Callable[..., argparse.Action], kind: AdapterKind) -> None:
    """Adds the options that say what synthetic adapters look like."""
    ranks, targets = by_default(kind.ranks), by_default(kind.targets)
    add("--ranks", type=numbers, default=kind.ranks, metavar="LIST", help=f"of the adapters, in turn {ranks}")
    add("--targets", type=words, default=kind.targets, metavar="LIST", help=f"of the adapters {targets}")


def options_of(args: argparse.Namespace) -> ServeOptions:
    """The options that were given.

    Raises:
        ConfigError: they cannot be measured.
    """
    taken = """model device dtype requests rate popularity distinct own_copies host_gb lengths eviction prefetch
    max_running max_batched_tokens join_every shards peft seed""".split()
    given: dict[str, Any] = {name: getattr(args, name) for name in taken}
    if args.registered is not None:
        given["registered"] = sum(args.registered, ())
    options = ServeOptions(**given, kind=AdapterKind(args.ranks, args.targets))
    options.check_host()
    check_split(options.model_config(), options.shards)
    return options


def prepare_load(args: argparse.Namespace) -> Measure:
    """Loads by policy."""
    return partial(bench_load, options=options_of(args))


def prepare_serve(args: argparse.Namespace) -> Measure:
    """Throughput; with --plot also the picture of the last run.

    Raises:
        ConfigError: there is more than one policy, or no such picture can be drawn.
    """
    options = options_of(args)
    if len(options.eviction) > 1:
        raise ConfigError(f"eviction is {','.join(options.eviction)}; bench serve takes one, bench load several")
    if args.plot is None:
        return partial(bench_serve, options=options)
    check_plot(args.plot)
    return partial(_serve_and_plot, options=options, path=args.plot)


def _serve_and_plot(say: Say, options: ServeOptions, path: Path) -> Rows:
    runs: list[Run] = []
    rows = bench_serve(say, options, runs.append)
    title = f"{rows[-1]['registered']:,} adapters registered, {rows[-1]['adapters']:,} asked for"
    plot_occupancy(path, title, runs[-1].meter.times, runs[-1].meter.usages)
    return rows
