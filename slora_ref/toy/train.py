"""Makes the toy model again from its seeds: the base, one adapter a task, and the accuracy table.

    python -m slora_ref.toy.train --folder /tmp/toy                     everything, beside the shipped files
    python -m slora_ref.toy.train --folder /tmp/toy --parts accuracy    only the table

Without `--folder` the files in the package are replaced. Needs the extra `oracle` (torch, transformers, peft); runs
on one thread, because the matrices are small and because the order of sums, and so every bit, then repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from slora_ref.toy.accuracy import misses, render
from slora_ref.toy.evaluate import measure
from slora_ref.toy.export import save_adapter, save_base
from slora_ref.toy.files import SHIPPED, ToyFiles
from slora_ref.toy.tasks import TASKS
from slora_ref.toy.train_adapters import load_base, train_adapter
from slora_ref.toy.train_base import task_shares, train_base, without_task_tokens

PARTS: Final = ("base", "adapters", "accuracy")


def make_base(files: ToyFiles) -> None:
    """Trains and writes model/."""
    model = train_base()
    shares = task_shares(model, words=300)
    print("base, told the task: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    save_base(without_task_tokens(model), files)


def make_adapters(files: ToyFiles, names: Sequence[str]) -> None:
    """Trains and writes adapters/<name>/ for each of `names`."""
    base = load_base(files)
    for name in names:
        model = train_adapter(base, TASKS[name])
        save_adapter(model, TASKS[name], files)
        base = model.unload()


def make_accuracy(files: ToyFiles) -> list[str]:
    """Measures, writes accuracy.json and ACCURACY.md, and returns what misses the bars."""
    accuracy = measure(files)
    files.accuracy.write_text(json.dumps(accuracy, indent=1) + "\n")
    files.report.write_text(render(accuracy))
    return misses(accuracy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 if the table misses a bar."""
    parser = argparse.ArgumentParser(prog="python -m slora_ref.toy.train", description="Trains the toy model.")
    parser.add_argument("--folder", type=Path, default=SHIPPED.root, help="where to write (default: into the package)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to make (default: everything)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS), help="adapters to train")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files, started = ToyFiles(chosen.folder), time.monotonic()
    if "base" in chosen.parts:
        make_base(files)
    if "adapters" in chosen.parts:
        make_adapters(files, chosen.tasks)
    missed = make_accuracy(files) if "accuracy" in chosen.parts else []
    print("\n".join([*missed, f"{time.monotonic() - started:.0f} s"]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
