"""Parses the command line and turns every error about the input into one line and exit code 2.

Exit codes: 0, all went well; 1, a check failed; 2, bad arguments or bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq

from slora_ref import __version__
from slora_ref.cli.bench import add_parser as add_bench
from slora_ref.cli.demo import add_parser as add_demo
from slora_ref.cli.generate import add_parser as add_generate
from slora_ref.cli.inspect import add_parser as add_inspect
from slora_ref.errors import SloraError

COMMANDS = (add_demo, add_generate, add_inspect, add_bench)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command module adds its own."""
    top = argparse.ArgumentParser(
        prog="slora-ref", description="S-LoRA: one base model, thousands of LoRA adapters, one page pool, one batch."
    )
    top.add_argument("--version", action="version", version=f"slora_ref {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(commands)
    return top


def main(argv: Seq[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except SloraError as error:
        print(f"slora-ref {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"slora-ref {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
