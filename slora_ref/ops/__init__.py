"""One interface, several backends: what the model asks of a device (DESIGN: ops).

NumpyOps is the specification and the CPU path. Backends share the arrays of ops/tables.py and know neither requests nor
pages' owners.
"""

from slora_ref.ops.kernel_ops import KernelOps
from slora_ref.ops.numpy_ops import NumpyOps
from slora_ref.ops.tables import LORA_GROUPS, AdapterTables, LoraGroup, Segments, Spans

Ops = NumpyOps | KernelOps  # what a model computes with; HostOps and CudaOps are the KernelOps there are

__all__ = ["LORA_GROUPS", "AdapterTables", "KernelOps", "LoraGroup", "NumpyOps", "Ops", "Segments", "Spans"]
