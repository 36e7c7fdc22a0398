"""EngineConfig: how the engine runs a model. Options of scheduling carry the paper's name where the paper has one.

It says nothing about the model and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slora_ref.errors import ConfigError
from slora_ref.options import check_choice, check_real, check_switch, check_whole, is_finite

MOST_SLOTS = 1 << 16  # sequences or adapters: their tables are allocated at start
MOST_BYTES = 1 << 50
MOST_SHARDS = 1 << 10
COMMUNICATORS = ("threads", "mpi", "nccl")
DTYPES = {"cpu": ("float32", "float64"), "cuda": ("float16", "bfloat16", "float32")}
"""What each device computes in, the usual one first."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Args:
        device: where the model runs: "cpu", in NumPy, or "cuda", by the kernels of kernels_cu.
        shards: tensor-parallel workers that the model is split over (paper section 6); loads are then "inline".
        communicator: what the shards are: "threads" of this process, on the CPU; "nccl": processes with a GPU each,
            started by the engine; "mpi": processes started by mpirun, on the CPU, or with a GPU each and NCCL; "auto":
            threads on the CPU, nccl on GPUs.
        overlap_lora: on several GPUs, LoRA's first product and its message run on a stream of their own beside the base
            model's product (paper section 6), not between it and what reads both. Off, since on two H200s a decode step
            of a 13B shape took longer with it: see tests/gpu/two_gpus.sh.
        peer_messages: on GPUs of one host that can reach each other's memory, kernels move arrays of up to 8 MiB by
            writing into it, in less time than NCCL takes (with more than two, up to 8 MiB to all others together);
            else, and what is larger, NCCL does.
        dtype: of weights, activations and pool; "auto": float32 on the CPU, float16 on a GPU. Sums are in float32.
        pool_pages: pages of the pool; None: as many as fit in pool_bytes.
        pool_bytes: size of the pool where pool_pages is None; None: 256 MiB on the CPU, and on a GPU all that is left.
        memory_fraction: of the GPU's memory that weights, workspace and pool may take together (vLLM:
            gpu_memory_utilization).
        max_running: most sequences in a step.
        max_batched_tokens: most rows in a step.
        max_length: longest prompt + output in tokens; None: the model's max_position_embeddings.
        max_adapters: most adapters resident at once (slots of the table); the pages are the other limit.
        enforce_eager: start a decode step's launches one by one; else, on a GPU, they are captured as CUDA graphs and
            started by one call (vLLM's name).
        admission: "max_tokens" reserves the peak that the running requests can reach and never preempts; "expected"
            assumes the mean finished length and preempts the newest sequence when the pool is full.
        chunked_prefill: cut long prompts so that running sequences keep decoding.
        separate_prefill: the paper's mode: a step is either prefill of new requests or decode.
        join_every: new requests join at the earliest so many steps after the last ones (the original: 10).
        blocking_loads: a step waits for the adapters of those that join (the original); else only they wait.
        host_bytes: size of the host memory for adapter weights, taken at the start (for a GPU all of it is pinned then;
            on the CPU the system backs it as it is used); beyond it they are read from their folders again.
        share_host_copies: names of one folder share its copy in host memory; otherwise each name has its own.
        loading: "background" reads and loads adapters on threads beside the steps, "inline" within them, so that a run
            can be repeated exactly.
        prefetch: most adapters loaded at once ahead of their requests' turn; 0: none.
        eviction: who leaves when pages are wanted: "lru" the least recently used, "cost" those that are least likely
            to be used again for the cost of loading them; "eager" (the paper): all that are not used, at once.
        async_scheduling: schedule and start a step before the tokens of the one before have come to the host (see
            engine/under_way.py); None: on a GPU.
        seed: of requests that bring no seed of their own.
        poison: fill free pages with NaN (tests).
        page_order_seed: hand out pages in a random order (tests).
    """

    device: Literal["cpu", "cuda"] = "cpu"
    shards: int = 1
    communicator: Literal["auto", "threads", "mpi", "nccl"] = "auto"
    overlap_lora: bool = False
    peer_messages: bool = True
    dtype: str = "auto"
    pool_pages: int | None = None
    pool_bytes: int | None = None
    memory_fraction: float = 0.9
    max_running: int = 128
    max_batched_tokens: int = 512
    max_length: int | None = None
    max_adapters: int = 1024
    enforce_eager: bool = False
    admission: Literal["max_tokens", "expected"] = "max_tokens"
    chunked_prefill: bool = True
    separate_prefill: bool = False
    join_every: int = 1
    blocking_loads: bool = False
    host_bytes: int = 1 << 30
    share_host_copies: bool = True
    loading: Literal["background", "inline"] = "background"
    prefetch: int = 16
    eviction: Literal["lru", "eager", "cost"] = "lru"
    async_scheduling: bool | None = None
    seed: int = 0
    poison: bool = False
    page_order_seed: int | None = None

    def __post_init__(self) -> None:
        """Refuses, with the numbers, what cannot run."""
        check_choice(ConfigError, "device", self.device, tuple(DTYPES))
        check_choice(ConfigError, "dtype", self.dtype, ("auto", *DTYPES[self.device]))
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", DTYPES[self.device][0])
        check_whole(ConfigError, "shards", self.shards, 1, MOST_SHARDS)
        check_choice(ConfigError, "communicator", self.communicator, ("auto", *COMMUNICATORS))
        if self.communicator == "auto":
            object.__setattr__(self, "communicator", "threads" if self.device == "cpu" else "nccl")
        if self.shards > 1:
            wrong = "threads" if self.device == "cuda" else "nccl"
            if self.communicator == wrong:
                others = " or ".join(name for name in COMMUNICATORS if name != wrong)
                raise ConfigError(f"communicator {wrong} has no shards on device {self.device}; take {others}")
            object.__setattr__(self, "loading", "inline")
        check_choice(ConfigError, "admission", self.admission, ("max_tokens", "expected"))
        check_choice(ConfigError, "eviction", self.eviction, ("lru", "eager", "cost"))
        check_choice(ConfigError, "loading", self.loading, ("background", "inline"))
        switches = "overlap_lora peer_messages enforce_eager chunked_prefill separate_prefill blocking_loads poison"
        for name in (*switches.split(), "share_host_copies"):
            check_switch(ConfigError, name, getattr(self, name))
        check_whole(ConfigError, "join_every", self.join_every, 1)
        check_whole(ConfigError, "prefetch", self.prefetch, 0, MOST_SLOTS)
        check_whole(ConfigError, "max_batched_tokens", self.max_batched_tokens, 1)
        for name in ("max_running", "max_adapters"):
            check_whole(ConfigError, name, getattr(self, name), 1, MOST_SLOTS)
        check_whole(ConfigError, "host_bytes", self.host_bytes, 1, MOST_BYTES)
        if self.pool_bytes is not None:
            check_whole(ConfigError, "pool_bytes", self.pool_bytes, 1, MOST_BYTES)
        if self.async_scheduling is None:
            object.__setattr__(self, "async_scheduling", self.device == "cuda")
        check_switch(ConfigError, "async_scheduling", self.async_scheduling)
        share = self.memory_fraction
        check_real(ConfigError, "memory_fraction", share, is_finite(share) and 0 < share <= 1, "above 0 and at most 1")
        check_whole(ConfigError, "seed", self.seed, 0, (1 << 64) - 1)
        for name, least in (("pool_pages", 1), ("max_length", 1), ("page_order_seed", 0)):
            if getattr(self, name) is not None:
                check_whole(ConfigError, name, getattr(self, name), least)
        if self.max_batched_tokens <= self.max_running:
            raise ConfigError(
                f"max_batched_tokens {self.max_batched_tokens} must be above max_running {self.max_running}: every "
                "running sequence decodes one token a step, and a prompt must still get on"
            )
