"""Devices: what an engine's parts need to know of the place where its model runs. The CPU, or wherever kernels run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np

from slora_ref.checkpoint import ModelWeights, cut_weights, drawn_weights, float_dtype, random_weights
from slora_ref.checkpoint.shard import cut_layer, cut_vocabularies
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.device_loader import DeviceLoader, PageWriter
from slora_ref.engine.writers import DeviceWriter, HostWriter, Writer
from slora_ref.errors import ConfigError, how_to_install
from slora_ref.executor import Executor, FollowingExecutor, KernelExecutor, ModelExecutor
from slora_ref.model import LlamaModel
from slora_ref.ops import KernelOps, NumpyOps, Ops
from slora_ref.ops.collectives import StepCommunicator
from slora_ref.ops.device_tables import DeviceTables
from slora_ref.ops.ladder import usable
from slora_ref.pager import PageLayout, PagePool, PageStorage
from slora_ref.prefetch import ImmediateLoader, Loader, ThreadLoader
from slora_ref.store import AdapterStore, plain_memory
from slora_ref.tp import WHOLE, Shard
from slora_ref.tp.communicator import Communicator

CPU_POOL_BYTES = 256 << 20  # leaves a laptop usable
Leading = tuple[Executor, Loader]
Following = tuple[FollowingExecutor, Writer]


class Device(Protocol):
    """Where a model runs."""

    def ops(self) -> Ops:
        """What computes there."""

    def with_ops(self, ops: Ops) -> Device:
        """The same place, where something else computes."""

    def place(self, array: Any) -> Any:
        """An array of the host, there."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array there; MemoryError if there is no room."""

    def host_memory(self, nbytes: int) -> Any:
        """Bytes in host memory from which adapters are loaded; MemoryError if there is no room."""

    def random_weights(self, model: ModelConfig, seed: int, shard: Shard) -> ModelWeights:
        """A shard's part of weights made there."""

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Takes the memory that steps need, and compiles what they run."""

    def memory_bytes(self) -> int:
        """Memory in all."""

    def pool_bytes(self, config: EngineConfig) -> int:
        """What the pool may take, after `prepare`; not above 0 where nothing is left."""

    def parts(self, model: LlamaModel, pool: PagePool, store: AdapterStore, config: EngineConfig) -> Leading:
        """What runs the model's steps, and what brings adapters into its pool."""

    def communicator(self, inner: Communicator) -> Communicator:
        """What moves the arrays of steps, where `inner` moves them between shards."""

    def following_parts(self, model: LlamaModel, pool: PageStorage, config: EngineConfig) -> Following:
        """What runs steps, and what writes adapters, on a shard that does not lead."""


class CpuDevice:
    """The host, in NumPy."""

    def __init__(self, config: EngineConfig, ops: Ops | None = None) -> None:
        self.dtype, self._ops = config.dtype, ops or NumpyOps(config.dtype)

    def ops(self) -> Ops:
        """NumPy, unless it was replaced."""
        return self._ops

    def with_ops(self, ops: Ops) -> Device:
        """A copy."""
        other = copy(self)
        other._ops = ops
        return other

    def place(self, array: Any) -> Any:
        """Itself."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array."""
        return np.empty(shape, dtype)

    def host_memory(self, nbytes: int) -> Any:
        """Memory of the process."""
        return plain_memory(nbytes)

    def random_weights(self, model: ModelConfig, seed: int, shard: Shard) -> ModelWeights:
        """From NumPy's generator."""
        return cut_weights(random_weights(model, seed, self.dtype), model, shard)

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Nothing."""

    def memory_bytes(self) -> int:
        """The machine's."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pool_bytes(self, config: EngineConfig) -> int:
        """A moderate size."""
        return CPU_POOL_BYTES

    def parts(self, model: LlamaModel, pool: PagePool, store: AdapterStore, config: EngineConfig) -> Leading:
        """Model and sampler in NumPy; loads are copies within main memory."""
        background = config.loading == "background"
        return ModelExecutor(model), (ThreadLoader if background else ImmediateLoader)(pool, store)

    def communicator(self, inner: Communicator) -> Communicator:
        """Arrays are moved as they are computed."""
        return inner

    def following_parts(self, model: LlamaModel, pool: PageStorage, config: EngineConfig) -> Following:
        """The model in NumPy."""
        return ModelExecutor(model), HostWriter(pool)


class KernelDevice(CpuDevice):
    """Where kernels run; with HostOps that is the host, through g++.

    Args:
        ops: launches them.
    """

    def __init__(self, config: EngineConfig, ops: KernelOps) -> None:
        super().__init__(config, ops)
        self._ops: KernelOps = ops

    def parts(self, model: LlamaModel, pool: PagePool, store: AdapterStore, config: EngineConfig) -> Leading:
        """Model and sampler by kernels; loads beside the steps."""
        executor = self._executor(model, pool, config)
        writer = PageWriter(pool, self._ops, executor.tables)
        return executor, DeviceLoader(pool, store, writer, at_once=config.loading == "inline")

    def communicator(self, inner: Communicator) -> Communicator:
        """Collectives are kept and repeated with the launches around them."""
        return inner if inner.shard.count == 1 else StepCommunicator(inner, self._ops)

    def following_parts(self, model: LlamaModel, pool: PageStorage, config: EngineConfig) -> Following:
        """The model by kernels."""
        executor = self._executor(model, pool, config)
        return executor, DeviceWriter(pool, self._ops, executor.tables)

    def _executor(self, model: LlamaModel, pool: PageStorage, config: EngineConfig) -> KernelExecutor:
        """What runs the model's steps."""
        tables, most = DeviceTables(self._ops, pool.sequence_pages, pool.adapters), config.max_batched_tokens
        return KernelExecutor(model, self._ops, tables, most, capture=not config.enforce_eager)


class CudaDevice(KernelDevice):
    """The current GPU, or the one of a shard, on a stream of its own.

    Raises:
        ConfigError: there is no CuPy, or no GPU; with the remedy.
    """

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE) -> None:
        check_cuda()
        self._memory: Any = importlib.import_module("slora_ref.ops.cuda_memory")
        if shard.count > 1:
            self._memory.use_gpu(shard.index)
        self._stream = self._memory.use_own_stream()
        dtype, kernels = float_dtype(config.dtype), importlib.import_module("slora_ref.ops.cuda_kernels").CudaKernels()
        kernels.compile_ahead(usable(dtype))
        cuda_ops = importlib.import_module("slora_ref.ops.cuda_ops")
        self._peer_messages = config.peer_messages
        how = {"kernels": kernels, "shards": shard.count, "overlap": config.overlap_lora}
        super().__init__(config, cuda_ops.CudaOps(dtype, **how))

    def communicator(self, inner: Communicator) -> Communicator:
        """NCCL, beside what carries the orders; small arrays go by kernels, if that is wanted and can be."""
        if inner.shard.count == 1:
            return inner
        nccl, peers = (importlib.import_module(f"slora_ref.{name}") for name in ("tp.nccl", "ops.cuda_peers"))
        moving = nccl.NcclCommunicator(inner)
        return StepCommunicator(moving, self._ops, peers.open_mailbox(inner) if self._peer_messages else None)

    def place(self, array: Any) -> Any:
        """A copy on the GPU."""
        return self._memory.to_device(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory of the GPU."""
        return self._memory.empty(shape, float_dtype(dtype))

    def host_memory(self, nbytes: int) -> Any:
        """Pinned, so that the copy engine and kernels can read it."""
        return self._memory.pinned_bytes(nbytes)

    def random_weights(self, model: ModelConfig, seed: int, shard: Shard) -> ModelWeights:
        """Made on the GPU; one whole layer at a time is there."""
        normals = self._memory.Normals(seed, float_dtype(self.dtype))
        weights = drawn_weights(model, normals.draw, normals.norm, partial(cut_layer, config=model, shard=shard))
        return cut_vocabularies(weights, model, shard)

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Runs steps of nothing but padding, over a pool of two pages."""
        longest = min(config.max_length or model.max_position_embeddings, model.max_position_embeddings)
        pool = PagePool(PageLayout(model), 2, config.max_running, longest, 1, float_dtype(self.dtype), empty=self.empty)
        tables = DeviceTables(self._ops, pool.sequence_pages, pool.adapters)
        llama = LlamaModel(model, weights, self._ops, pool, longest)
        KernelExecutor(llama, self._ops, tables, config.max_batched_tokens).warm_up()

    def memory_bytes(self) -> int:
        """The GPU's."""
        return int(self._memory.total_bytes())

    def pool_bytes(self, config: EngineConfig) -> int:
        """The fraction of all memory that was asked for, less what is taken already."""
        return int(config.memory_fraction * self._memory.total_bytes()) - int(self._memory.used_bytes())


def check_cuda() -> None:
    """Raises ConfigError where kernels cannot run on a GPU, with the remedy."""
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"device cuda needs an NVIDIA GPU and CuPy: {how_to_install('cuda12')}, or [cuda13]")
    runtime = importlib.import_module("cupy").cuda.runtime
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"device cuda needs an NVIDIA GPU, and CuPy finds none: {error}; [cuda12] or [cuda13] must match the driver"
        ) from None
    if not devices:
        raise ConfigError("device cuda needs an NVIDIA GPU, and CuPy finds none")


def open_device(config: EngineConfig, shard: Shard = WHOLE) -> Device:
    """The device that the options ask for; each shard of a host has its own GPU.

    Raises:
        ConfigError: there is no such device here.
    """
    return CudaDevice(config, shard) if config.device == "cuda" else CpuDevice(config)
