"""What is known without fitting anything: GPUs from their data sheets, the paper's model shapes, settings and pools.

Bandwidths and FLOP rates are the vendors' (dense fp16 on tensor cores). Settings are the paper's Table 1 as the
authors' code has it; pool sizes are those that the authors typed for each machine (`--num-token`).
"""

from __future__ import annotations

from dataclasses import dataclass

from slora_ref.config import ModelConfig
from slora_ref.config.presets import llama_shape
from slora_ref.pager import PageLayout

FP16 = 2


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Args:
        bandwidth: bytes a second of device memory.
        flops: a second, dense fp16.
        cache: bytes a second that the multiprocessors can load from the L2 cache: 64 a clock each, at boost clock.
        link: bytes a second from host memory, of the PCIe generation (16 lanes).
        memory: bytes.
    """

    name: str
    bandwidth: float
    flops: float
    cache: float
    link: float
    memory: float

    def times(self, count: int) -> GPU:
        """So many of them, as one: each works on its part of a model at the same time."""
        rates = {name: count * getattr(self, name) for name in ("bandwidth", "flops", "cache", "link", "memory")}
        return GPU(self.name, **rates)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a10g", 600e9, 125e12, 64 * 72 * 1.71e9, 32e9, 24e9),
        GPU("a100-40", 1555e9, 312e12, 64 * 108 * 1.41e9, 32e9, 40e9),
        GPU("a100-80", 2039e9, 312e12, 64 * 108 * 1.41e9, 32e9, 80e9),
        GPU("h100", 3350e9, 989e12, 64 * 132 * 1.98e9, 64e9, 80e9),
        GPU("h200", 4800e9, 989e12, 64 * 132 * 1.98e9, 64e9, 141e9),
    )
}


def gpu_called(name: str) -> str | None:
    """The GPU of the table that a driver calls so, such as "NVIDIA A100-SXM4-80GB"; None: it is not there."""
    words = name.lower().replace("-", " ").split()
    known = {"h200": "h200", "h100": "h100", "a10g": "a10g", "a100": "a100-40" if "40gb" in words else "a100-80"}
    return next((key for word, key in known.items() if word in words), None)


MODELS = {
    "llama-7b": llama_shape(4096, 11008, 32, 32, 2048),
    "llama-13b": llama_shape(5120, 13824, 40, 40, 2048),
    "llama-30b-m": llama_shape(7168, 19456, 48, 56, 2048),  # the authors' own shape, not Llama's
    "llama-70b-m": llama_shape(8192, 24576, 80, 64, 2048),  # likewise, and without grouped queries
}

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Setting:
    """One of the paper's settings.

    Args:
        ranks: adapter i has ranks[i % len(ranks)], so adapter 0, the most popular one, has the largest.
    """

    model: str
    ranks: tuple[int, ...]


SETTINGS = {
    "S1": Setting("llama-7b", (8,)),
    "S2": Setting("llama-7b", (64, 32, 16, 8)),
    "S4": Setting("llama-13b", (64, 32, 16)),
    "S5": Setting("llama-30b-m", (32,)),
    "S6": Setting("llama-70b-m", (64,)),
}

POOL_TOKENS = {
    ("llama-7b", "a10g"): 14_500,
    ("llama-13b", "a100-40"): 14_000,
    ("llama-7b", "a100-80"): 125_000,
    ("llama-13b", "a100-80"): 65_000,
}
"""Tokens that keys, values and adapters share, by model and GPU."""

NO_UNIFY_TOKENS = {
    ("S1", "a10g"): {0: 13_500},
    ("S2", "a10g"): {0: 13_500, 20: 10_000, 50: 9_000},
    ("S4", "a100-40"): {0: 14_000, 20: 9_000},
    ("S2", "a100-80"): {0: 125_000, 100: 90_000},
    ("S4", "a100-80"): {0: 65_000, 100: 40_000, 200: 35_000},
}
"""What the authors typed without a unified pool, from so many adapters on. Which size belongs to which number of
adapters is not recorded; nor are the sizes of S1, taken as S2's first, and of the A100-40 at 50 and more."""

BMM_TOKENS = {
    ("S2", "a10g"): {0: 13_000, 20: 8_000},
    ("S2", "a100-80"): {0: 125_000, 20: 70_000},
}
"""Likewise for bmm."""

PEFT_BATCH = {("S1", "a10g"): 6, ("S2", "a10g"): 6, ("S1", "a100-80"): 50, ("S2", "a100-80"): 50, ("S4", "a100-80"): 35}
"""The authors' hard-coded most requests of a PEFT batch."""

LOAD_SECONDS, LINK_BYTES_PER_S = 4e-3, 24e9
"""What a load of one adapter of the original takes beside its bytes: two copies and two scatters in each layer, one
after the other; and what PCIe 4 x16 brings of its 32e9. Assumed, not fitted: the authors recorded neither. An
H200's PCIe 5 brings 55e9 of 64e9 in one copy (link_gb_s in bench/results/KERNELS-H200.json), less in small ones."""

MEMORY_USED = 0.92
"""Part of a GPU's memory for weights and pool, where the pool is all that is left: vLLM's default is 0.9 to 0.95."""

LONGEST_PROMPT_AND_OUTPUT = 3072
"""`max_req_total_len` of the original: also the least that its prefill batch may hold."""

MOST_RUNNING = 1000


def free_tokens(gpu: GPU, model: ModelConfig, weights: int) -> int:
    """The pool that is left beside so many bytes of weights, in tokens; at least 1."""
    layout = PageLayout(model)
    return max(1, int(MEMORY_USED * gpu.memory - weights) // (layout.token_pages(1) * layout.page_bytes(FP16)))


def prefill_tokens(pool_tokens: int) -> int:
    """The original's default for the most prompt tokens of a prefill batch: a sixth of the pool."""
    return max(pool_tokens // 6, LONGEST_PROMPT_AND_OUTPUT)
