"""The loop around scheduler, prefetcher and executor, and its public face."""

from slora_ref.engine.engine import Engine
from slora_ref.engine.outputs import Completion, RequestOutput

__all__ = ["Completion", "Engine", "RequestOutput"]
