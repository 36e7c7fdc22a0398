"""Scale: how large the real runs are, on the CPU with the toy's shape and on a GPU with Llama-7B's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.config.presets import preset
from slora_ref.synthetic import AdapterKind
from slora_ref.toy import MODEL_FOLDER


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What all runs on a device share.

    Args:
        model: "toy", or a shape of config.presets; the weights are random.
        gpu: of simulate.datasheet, for the simulator; None: it knows no such device.
        requests: of a run; all come at once.
        lengths: [low, high) of prompts, and of answers, in tokens.
        pool_tokens: the pool, in tokens; tight_tokens: where the division of the pool is studied.
        distinct: sets of adapter weights that the names share; pages are never shared.
        kind: of the adapters: the paper's setting S2.
    """

    device: str
    model: str
    gpu: str | None
    requests: int
    lengths: tuple[int, int]
    max_running: int
    max_batched_tokens: int
    pool_tokens: int
    tight_tokens: int
    distinct: int
    kind: AdapterKind = AdapterKind((64, 32, 16, 8))

    def model_config(self) -> ModelConfig:
        """The shape."""
        return ModelConfig.from_folder(MODEL_FOLDER) if self.model == "toy" else preset(self.model)

    def engine_config(self, pool_tokens: int) -> EngineConfig:
        """The engine's options; adapters have room in host memory."""
        on_gpu = self.device == "cuda"
        host = self.kind.folder_bytes(self.model_config(), self.distinct) * (1 if on_gpu else 2)
        return EngineConfig(
            device="cuda" if on_gpu else "cpu",
            pool_pages=2 * pool_tokens,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            max_length=2 * self.lengths[1],
            host_bytes=host + host // 4 + (1 << 20),
        )


SCALES: Mapping[str, Scale] = {
    "cpu": Scale(
        device="cpu",
        model="toy",
        gpu=None,
        requests=160,
        lengths=(8, 64),
        max_running=16,
        max_batched_tokens=256,
        pool_tokens=40_000,
        tight_tokens=8_000,
        distinct=8,
    ),
    "cuda": Scale(
        device="cuda",
        model="llama-7b",
        gpu="h200",
        requests=96,
        lengths=(8, 512),
        max_running=96,
        max_batched_tokens=2048,
        pool_tokens=60_000,
        tight_tokens=20_000,
        distinct=16,
    ),
}
