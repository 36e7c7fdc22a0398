"""One interface, several backends: what the model asks of a device (DESIGN: ops).

NumpyOps is the specification and the CPU path. Backends share the arrays of ops/tables.py and know neither requests nor
pages' owners.
"""

from slora_ref.ops.numpy_ops import NumpyOps
from slora_ref.ops.tables import LORA_GROUPS, AdapterTables, LoraGroup, Segments, Spans

__all__ = ["LORA_GROUPS", "AdapterTables", "LoraGroup", "NumpyOps", "Segments", "Spans"]
