"""Parses the command line and turns every error about the input into one line and exit code 2.

Exit codes: 0, all went well; 1, a check failed; 2, bad arguments or bad input.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from slora_ref import __version__
from slora_ref.cli.bench import add_parser as add_bench
from slora_ref.cli.demo import add_parser as add_demo
from slora_ref.cli.generate import add_parser as add_generate
from slora_ref.cli.inspect import add_parser as add_inspect
from slora_ref.cli.output import give_up_stdout, print_anywhere
from slora_ref.cli.paper import add_parser as add_paper
from slora_ref.config.fields import show
from slora_ref.errors import SloraError

COMMANDS = (add_demo, add_generate, add_inspect, add_bench, add_paper)


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
    print_anywhere()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        return _main(argv)


def _main(argv: Seq[str] | None) -> int:
    name, options = "slora-ref", dict[str, object]()
    try:
        try:
            args = parser().parse_args(argv)
            args.argv = sys.argv[1:] if argv is None else list(argv)
            name, options = f"slora-ref {args.command}", vars(args)
            run: Callable[[argparse.Namespace], int] = args.run
            return run(args)
        finally:  # also after --help
            sys.stdout.flush()
    except SloraError as error:
        print(f"{name}: error: {_as_typed(str(error), options)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        give_up_stdout()
        return 141
    except OSError as error:  # a full disk, a folder that may not be read
        give_up_stdout()
        print(f"{name}: error: {_about(error)}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, *_: object) -> None:
    """One line, as for errors, without the place in our code."""
    print(f"slora-ref: warning: {message}", file=sys.stderr)


def _as_typed(message: str, options: Collection[str]) -> str:
    """A message about an option by the name that it has on the command line: `top_p is 2` -> `--top-p is 2`."""
    name, verb, _ = (message + "  ").split(" ", 2)
    return f"--{name.replace('_', '-')}{message[len(name) :]}" if name in options and verb in ("is", "are") else message


def _about(error: OSError) -> str:
    where = "" if error.filename is None else f"{show(str(error.filename))}: "
    return f"{where}{error.strerror or error}"
