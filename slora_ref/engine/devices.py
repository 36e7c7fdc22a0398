"""Devices: what an engine's parts need to know of the place where its model runs. The CPU, or wherever kernels run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Protocol

import numpy as np

from slora_ref.checkpoint import ModelWeights, drawn_weights, float_dtype, random_weights
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.device_loader import DeviceLoader
from slora_ref.errors import ConfigError
from slora_ref.executor import Executor, KernelExecutor, ModelExecutor
from slora_ref.model import LlamaModel
from slora_ref.ops import KernelOps, NumpyOps, Ops
from slora_ref.ops.device_tables import DeviceTables
from slora_ref.pager import PageLayout, PagePool
from slora_ref.prefetch import ImmediateLoader, Loader, ThreadLoader
from slora_ref.store import AdapterStore, plain_memory

CPU_POOL_BYTES = 256 << 20  # leaves a laptop usable


class Device(Protocol):
    """Where a model runs."""

    def ops(self) -> Ops:
        """What computes there."""
        ...

    def place(self, array: Any) -> Any:
        """An array of the host, there."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array there; MemoryError if there is no room."""
        ...

    def host_memory(self, nbytes: int) -> Any:
        """Bytes in host memory from which adapters are loaded; MemoryError if there is no room."""
        ...

    def random_weights(self, model: ModelConfig, seed: int) -> ModelWeights:
        """Weights made there."""
        ...

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Takes the memory that steps need, and compiles what they run."""
        ...

    def memory_bytes(self) -> int:
        """Memory in all."""
        ...

    def pool_bytes(self, config: EngineConfig) -> int:
        """What the pool may take, after `prepare`; not above 0 where nothing is left."""
        ...

    def parts(self, model: LlamaModel, store: AdapterStore, config: EngineConfig) -> tuple[Executor, Loader]:
        """What runs the model's steps, and what brings adapters into its pool."""
        ...


class CpuDevice:
    """The host, in NumPy."""

    def __init__(self, config: EngineConfig) -> None:
        self.dtype = config.dtype

    def ops(self) -> Ops:
        """NumPy."""
        return NumpyOps(self.dtype)

    def place(self, array: Any) -> Any:
        """Itself."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array."""
        return np.empty(shape, dtype)

    def host_memory(self, nbytes: int) -> Any:
        """Memory of the process."""
        return plain_memory(nbytes)

    def random_weights(self, model: ModelConfig, seed: int) -> ModelWeights:
        """From NumPy's generator."""
        return random_weights(model, seed, self.dtype)

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Nothing."""

    def memory_bytes(self) -> int:
        """The machine's."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pool_bytes(self, config: EngineConfig) -> int:
        """A moderate size."""
        return CPU_POOL_BYTES

    def parts(self, model: LlamaModel, store: AdapterStore, config: EngineConfig) -> tuple[Executor, Loader]:
        """Model and sampler in NumPy; loads are copies within main memory."""
        background = config.loading == "background"
        return ModelExecutor(model), (ThreadLoader if background else ImmediateLoader)(model.pool, store)


class KernelDevice(CpuDevice):
    """Where kernels run; with HostOps that is the host, through g++.

    Args:
        ops: launches them.
    """

    def __init__(self, config: EngineConfig, ops: KernelOps) -> None:
        super().__init__(config)
        self._ops = ops

    def ops(self) -> Ops:
        """Kernels."""
        return self._ops

    def parts(self, model: LlamaModel, store: AdapterStore, config: EngineConfig) -> tuple[Executor, Loader]:
        """Model and sampler by kernels; loads beside the steps."""
        tables = DeviceTables(self._ops, model.pool.sequence_pages, model.pool.adapters)
        executor = KernelExecutor(model, self._ops, tables, config.max_batched_tokens)
        return executor, DeviceLoader(model.pool, store, self._ops, tables, at_once=config.loading == "inline")


class CudaDevice(KernelDevice):
    """The current GPU, on a stream of its own.

    Raises:
        ConfigError: there is no CuPy, or no GPU; with the remedy.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_cuda()
        self._memory: Any = importlib.import_module("slora_ref.ops.cuda_memory")
        self._stream = self._memory.use_own_stream()
        super().__init__(config, importlib.import_module("slora_ref.ops.cuda_ops").CudaOps(float_dtype(config.dtype)))

    def place(self, array: Any) -> Any:
        """A copy on the GPU."""
        return self._memory.to_device(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory of the GPU."""
        return self._memory.empty(shape, float_dtype(dtype))

    def host_memory(self, nbytes: int) -> Any:
        """Pinned, so that a kernel can read it."""
        return self._memory.pinned_bytes(nbytes)

    def random_weights(self, model: ModelConfig, seed: int) -> ModelWeights:
        """Made on the GPU."""
        normals = self._memory.Normals(seed, float_dtype(self.dtype))
        return drawn_weights(model, normals.draw, normals.norm)

    def prepare(self, model: ModelConfig, weights: ModelWeights, config: EngineConfig) -> None:
        """Runs steps of nothing but padding, over a pool of two pages."""
        positions = min(config.max_length or model.max_position_embeddings, model.max_position_embeddings)
        sizes = (2, config.max_running, positions, 1)
        pool = PagePool(PageLayout(model), *sizes, float_dtype(self.dtype), empty=self.empty)
        tables = DeviceTables(self._ops, pool.sequence_pages, pool.adapters)
        llama = LlamaModel(model, weights, self._ops, pool, positions)
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
        raise ConfigError("device cuda needs a GPU and CuPy: pip install 'slora_ref[cuda12]', or [cuda13]")
    runtime = importlib.import_module("cupy").cuda.runtime
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"device cuda needs a GPU, and CuPy finds none: {error}; use --device cpu") from None
    if not devices:
        raise ConfigError("device cuda needs a GPU, and CuPy finds none; use --device cpu")


def open_device(config: EngineConfig) -> Device:
    """The device that the options ask for.

    Raises:
        ConfigError: there is no such device here.
    """
    return CudaDevice(config) if config.device == "cuda" else CpuDevice(config)
