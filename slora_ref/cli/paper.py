"""`slora-ref paper`: reruns results of the paper in the simulator, beside the authors' raw numbers."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slora_ref.bench.real import EXPERIMENTS as REAL
from slora_ref.bench.real import SCALES
from slora_ref.cli.output import Screen, Subparsers, print_json
from slora_ref.cli.paper_real import run_real
from slora_ref.errors import ConfigError
from slora_ref.options import check_whole
from slora_ref.paper.experiments import EXPERIMENTS
from slora_ref.paper.picture import check_picture, draw
from slora_ref.paper.play import Row, compare, play_all
from slora_ref.paper.points import Point
from slora_ref.paper.report import as_csv, as_json, as_table, plain_table
from slora_ref.paper.run import VARIANTS
from slora_ref.paper.studies import STUDIES

ALL = "all"


def add_parser(commands: Subparsers) -> None:
    """Adds the command's own arguments."""
    parser = commands.add_parser(
        "paper",
        help="rerun the paper's tables and figures in the simulator",
        description="Plays the paper's experiments through the real scheduler, policies, allocator and prefetcher, "
        "under a simulated clock, and prints each number beside what the authors measured and what a null model says.",
    )
    parser.add_argument("what", choices=[*EXPERIMENTS, *STUDIES, ALL], help="a table, a figure, a study, or all")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default="original",
        help="original: the authors' options alone; paper, ours: beside them the paper's way, or this engine's",
    )
    parser.add_argument(
        "--device",
        choices=["simulator", *SCALES],
        default="simulator",
        help=f"cpu, cuda: run a few points for real, with every baseline (of {', '.join(REAL)}, or all)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write CSV files, and with --svg figures, into it")
    parser.add_argument("--svg", action="store_true", help="draw, too (needs matplotlib and --out)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plays and prints.

    Raises:
        ConfigError: figures are wanted, and there is no folder for them, or no matplotlib; or an option is for
            experiments alone, and a study was asked for.
    """
    if args.device != "simulator":
        return run_real(args)
    if args.what in STUDIES and (args.svg or args.variant != "original"):
        raise ConfigError(f"{args.what} is a study of its own: it has no --variant, and its table is no figure (--svg)")
    if args.out is not None:
        _make_folder(args.out)
    if args.svg:
        if args.out is None:
            raise ConfigError("--svg needs --out DIR, the folder that figures are written into")
        check_picture()
    if args.jobs is not None:
        check_whole(ConfigError, "--jobs", args.jobs, 1, 1024)
    screen = Screen(args.json)
    names = [*EXPERIMENTS, *STUDIES] if args.what == ALL else [args.what]
    start = time.perf_counter()
    points = {name: _with_variant(EXPERIMENTS[name](), args.variant) for name in names if name in EXPERIMENTS}
    rows = _play(points, args.jobs, screen)
    found: dict[str, Seq[dict[str, Any]]] = {name: [asdict(row) for row in own] for name, own in rows.items()}
    found |= {name: STUDIES[name]() for name in names if name in STUDIES}
    for name in names:
        screen.say(f"\n{name}\n{as_table(rows[name]) if name in rows else plain_table(found[name])}")
        if args.out is not None:
            (args.out / f"{name}.csv").write_text(as_csv(found[name]), encoding="utf-8")
            if args.svg and name in rows:
                draw(name, rows[name], args.out / f"{name}.svg")
    if args.json:
        compared = [row for own in rows.values() for row in own]
        studied = [row for name in names if name in STUDIES for row in found[name]]
        print_json(as_json(args.what, time.perf_counter() - start, compared, studied))
    return 0


def _make_folder(path: Path) -> None:
    """Before anything is played. Raises ConfigError when files cannot be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; name a folder that can be written") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out {path} cannot be written into; name another folder")


def _with_variant(points: list[Point], variant: str) -> list[Point]:
    """The points, and where another variant is asked for, its beside them."""
    if variant == "original":
        return points
    chosen = next(known for known in VARIANTS if known == variant)
    own = [point.as_variant(chosen) for point in points if point.run.system == "slora"]
    return [*points, *own]


def _play(points: dict[str, list[Point]], jobs: int | None, screen: Screen) -> dict[str, list[Row]]:
    """Plays every run once, with a live line of how far it is."""

    def done(count: int, total: int) -> None:
        if screen.live is not None:
            screen.live(lambda columns: f"played {count}/{total} runs"[: columns - 1])

    played = play_all((point.run for own in points.values() for point in own), done=done, jobs=jobs)
    screen.clear()
    return {name: compare(own, played) for name, own in points.items()}
