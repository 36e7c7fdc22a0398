"""The command line: `python -m slora_ref COMMAND`, installed as `slora-ref`."""

from slora_ref.cli.main import main

__all__ = ["main"]
