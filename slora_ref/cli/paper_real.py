"""`slora-ref paper WHAT --device cpu|cuda`: a few points of the paper for real, beside the simulator."""

from __future__ import annotations

import argparse
import datetime
import shlex
from dataclasses import replace

from slora_ref.bench import copy_gb_s, machine_facts
from slora_ref.bench.real import EXPERIMENTS, SCALES, run_points
from slora_ref.cli.output import Screen, print_json
from slora_ref.engine.devices import check_cuda
from slora_ref.errors import ConfigError
from slora_ref.simulate.datasheet import gpu_called

LEGEND = """
simulated: requests/s by the simulator, with the constants fitted on the authors' system; bound: by the data sheet alone
as slora:  the share of requests whose first token is the one that the usual engine gives"""


def run_real(args: argparse.Namespace) -> int:
    """Runs and prints.

    Raises:
        ConfigError: what was asked for has no points that are run for real, an option is the simulator's, or there is
            no such device here.
    """
    names = list(EXPERIMENTS) if args.what == "all" else [args.what]
    if args.what not in (*EXPERIMENTS, "all"):
        raise ConfigError(
            f"{args.what} has no points for --device {args.device}: {', '.join(EXPERIMENTS)} have, or take all"
        )
    if args.svg or args.out is not None or args.jobs is not None or args.variant != "original":
        raise ConfigError("--variant, --out, --svg and --jobs are the simulator's; with --device take --json")
    on_gpu = args.device == "cuda"
    if on_gpu:
        check_cuda()
    screen, machine = Screen(args.json), machine_facts(on_gpu)
    scale = replace(SCALES[args.device], gpu=gpu_called(machine["gpu"]) if on_gpu else None)
    rows = run_points(names, scale, screen.say)
    screen.say(LEGEND)
    if args.json:
        print_json(
            {
                "bench": "paper",
                "experiment": args.what,
                "command": shlex.join(["slora-ref", *args.argv]),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": machine,
                "copy_gb_s": copy_gb_s() if on_gpu else None,
                "rows": rows,
            }
        )
    return 0
