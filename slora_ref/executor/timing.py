"""How long the parts of a step take: its launches, captured in a graph and started again and again."""

from __future__ import annotations

from collections.abc import Collection

from slora_ref.executor.kernel_executor import KernelExecutor
from slora_ref.ops.tape import Part, Tape


def milliseconds(executor: KernelExecutor, parts: Collection[Part] = ()) -> float:
    """Median time of these parts of the last step (none named: of all), without the host's; 0.0 if it had none.

    Where a part is communication, all shards must ask at the same time.
    """
    whole = Tape([work for tape in executor.last for work in tape.work])
    tape = whole.only(*parts) if parts else whole
    return executor.ops.graph(tape).milliseconds() if tape.work else 0.0
