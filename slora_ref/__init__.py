"""S-LoRA (Sheng et al., MLSys 2024) in readable form: one base model, thousands of adapters, one page pool, one batch.

    engine = Engine.from_pretrained("path/to/llama")
    engine.add_adapter("poet", "path/to/peft/folder")
    [answer] = engine.generate(["Roses are"], SamplingParams(max_tokens=20), adapters="poet")

To read the code, start with `allocator.py` and `pager/` (the pool, paper section 5), then `scheduler/`, `engine/`.
"""

from __future__ import annotations

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Completion, Engine, RequestOutput
from slora_ref.errors import SloraError
from slora_ref.request import FinishReason, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "SloraError",
]
