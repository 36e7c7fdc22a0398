"""How long the parts of a step take: its launches, captured in a graph and started again and again."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from slora_ref.executor.kernel_executor import KernelExecutor
from slora_ref.ops.tape import Part, Tape


def milliseconds(executor: KernelExecutor, parts: Collection[Part] = ()) -> float:
    """Median time of these parts of the last step (none named: of all), without the host's; 0.0 if it had none.

    Where a part is communication, all shards must ask at the same time.
    """
    whole = Tape([*executor.last_layers.work, *executor.last_logits.work])
    tape = whole.only(*parts) if parts else whole
    if not tape.work:
        return 0.0
    graph = importlib.import_module("slora_ref.ops.cuda_graph").CudaGraph(executor.ops, tape)
    return float(graph.milliseconds())
