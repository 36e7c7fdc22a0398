"""A GPU that is none: CuPy's streams, events, captures and NCCL on NumPy arrays, for tests of what waits for what.

Nothing is done when it is started. Only when the host waits does work go on, and then of all streams in any order that
their events allow, drawn from a seed. So whatever nobody waits for shows. Memory that nobody holds is handed out again
by the stream that was current when it was, though work that was started may still use it, as CuPy's pool does. Kernels
run by their host build; how they overlap within a stream is not modelled.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import random
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from slora_ref.ops.boxes import Box
from slora_ref.ops.host_kernels import HostKernels

Work = Callable[[], None]
BLOCK = 512  # bytes; memory is handed out in multiples of it
MODULES = [f"slora_ref.{name}" for name in ("ops.cuda_ops ops.cuda_blas ops.cuda_kernels ops.cuda_graph").split()]
MODULES += ["slora_ref.ops.cuda_memory", "slora_ref.ops.cuda_ticket", "slora_ref.ops.cuda_loads", "slora_ref.tp.nccl"]
MODULES += ["slora_ref.ops.cuda_peers"]


@dataclass
class Marker:
    """A place in a stream that others may wait for."""

    passed: bool = False


@dataclass
class Capture:
    """What has been started on streams since one of them began to capture: by stream, in order."""

    origin: Stream
    queues: dict[Stream, list[Marker | Work | tuple[Marker]]] = field(default_factory=dict)


class Gpu:
    """The streams, and who works next."""

    def __init__(self, seed: int) -> None:
        self.random, self.streams, self.memory = random.Random(seed), [], []
        self.boxes = 0  # that the copy engine was told to move
        self.free: dict[tuple[int, int], list[int]] = defaultdict(list)  # addresses, by stream and size
        self.default = Stream(self)
        self.current, self.stack = self.default, [self.default]  # as CuPy keeps them: `use` leaves the stack alone

    def empty(self, shape: Any, dtype: Any = np.float32) -> DeviceArray:
        """Memory from the current stream's free blocks, or new memory, full of NaN."""
        count, kind = int(np.prod(shape)), np.dtype(dtype)
        size = -(-max(1, count * kind.itemsize) // BLOCK) * BLOCK
        free = self.free[self.current.ptr, size]
        if not free:
            self.memory.append(np.full(size + BLOCK, 0xFF, np.uint8))
            free.append(-(-self.memory[-1].ctypes.data // BLOCK) * BLOCK)
        address = free.pop()
        block = (ctypes.c_char * size).from_address(address)
        weakref.finalize(block, free.append, address)
        return np.frombuffer(block, kind, count).reshape(shape).view(DeviceArray)

    def copy_of(self, array: Any, dtype: Any = None) -> DeviceArray:
        """A copy that the current stream makes of an array of the host."""
        source = np.array(array, dtype)
        copied = self.empty(source.shape, source.dtype)
        copied[...] = source
        return copied

    def by_pointer(self, pointer: int) -> Stream:
        """The stream that CuPy gives out as this number."""
        return next(stream for stream in self.streams if stream.ptr == pointer)

    def work_until(self, done: Callable[[], bool]) -> None:
        """Goes on until that is so."""
        while not done():
            ready = [stream for stream in self.streams if stream.ready]
            assert ready, "streams wait for each other, or for what was never started"
            self.random.choice(ready).advance()


class Stream:
    """A queue of work, markers, and markers to wait for (tuples)."""

    def __init__(self, gpu: Gpu, **_: bool) -> None:
        self.gpu, self.queue, self.capture = gpu, deque(), None
        self.ptr = id(self)
        gpu.streams.append(self)

    def put(self, item: Marker | Work | tuple[Marker]) -> None:
        if self.capture is None:
            self.queue.append(item)
        else:
            self.capture.queues.setdefault(self, []).append(item)

    @property
    def ready(self) -> bool:
        return bool(self.queue) and not (isinstance(self.queue[0], tuple) and not self.queue[0][0].passed)

    def advance(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Marker):
            item.passed = True
        elif callable(item):
            item()

    def use(self) -> Stream:
        self.gpu.current = self
        return self

    def __enter__(self) -> Stream:
        self.gpu.stack.append(self)
        return self.use()

    def __exit__(self, *_: object) -> None:
        self.gpu.stack.pop()
        self.gpu.stack[-1].use()

    def wait_event(self, event: Event) -> None:
        if event.capture is not None:
            self.capture = event.capture  # it joins
        if event.marker is not None:
            self.put((event.marker,))

    def synchronize(self) -> None:
        assert self.capture is None, "nobody can wait for a stream that captures"
        self.gpu.work_until(lambda: not self.queue)

    def begin_capture(self) -> None:
        self.capture = Capture(self)

    def end_capture(self) -> SimpleNamespace:
        capture, self.capture = self.capture, None
        waited = [item[0] for item in capture.queues.get(self, []) if isinstance(item, tuple)]
        for stream, items in capture.queues.items():
            stream.capture = None
            assert stream is self or items[-1] in waited, "a stream that has joined a capture has not come back"

        def launch(on: Stream) -> None:
            on.put(lambda: _run_graph(self.gpu, capture))

        return SimpleNamespace(launch=launch)


def _run_graph(gpu: Gpu, capture: Capture) -> None:
    """All of it, in some order that its events allow."""
    again = Gpu(gpu.random.randrange(1 << 30))
    markers: dict[int, Marker] = {}

    def fresh(item: Any) -> Any:
        if isinstance(item, tuple):
            return (markers.setdefault(id(item[0]), Marker()),)
        return markers.setdefault(id(item), Marker()) if isinstance(item, Marker) else item

    for items in capture.queues.values():
        Stream(again).queue.extend(map(fresh, items))
    again.work_until(lambda: not any(stream.queue for stream in again.streams))


class Event:
    """The last place at which it was recorded."""

    def __init__(self, gpu: Gpu, **_: bool) -> None:
        self.gpu, self.marker, self.capture = gpu, None, None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        self.marker, self.capture = Marker(), stream.capture
        stream.put(self.marker)

    @property
    def done(self) -> bool:
        return self.marker is None or self.marker.passed

    def synchronize(self) -> None:
        self.gpu.work_until(lambda: self.done)


class DeviceArray(np.ndarray):
    """An array that the host changes by work on the current stream."""

    gpu: Gpu

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.ctypes.data)

    def __getitem__(self, index: Any) -> Any:
        if any(isinstance(part, np.ndarray) for part in (index if isinstance(index, tuple) else (index,))):
            self.gpu.current.synchronize()  # a copy, not a view
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        plain = _by_address(self)
        source = _by_address(value) if isinstance(value, DeviceArray) else np.array(value)
        self.gpu.current.put(lambda: plain.__setitem__(index, source))

    def set(self, array: np.ndarray) -> None:
        self[...] = array


def _by_address(array: np.ndarray) -> np.ndarray:
    """The same numbers, by one who does not keep them alive."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    low, high = byte_bounds(array.view(np.ndarray))
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(array.shape, array.dtype, memory, array.ctypes.data - low, array.strides)


def install(monkeypatch: pytest.MonkeyPatch, seed: int, kernels: HostKernels) -> Gpu:
    """From here on, slora_ref finds a CuPy with one GPU; afresh, and none of its modules is left behind."""
    gpu = Gpu(seed)
    DeviceArray.gpu = gpu
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in _cupy(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    package = importlib.import_module
    monkeypatch.setattr(package("slora_ref.ops.cuda_kernels"), "CudaKernels", lambda: _Kernels(gpu, kernels))
    monkeypatch.setattr(package("slora_ref.ops.cuda_ops"), "Cublas", lambda: _Cublas(gpu))
    monkeypatch.setattr(package("slora_ref.ops.cuda_loads"), "_copies", partial(_copies, gpu))
    for name in MODULES:  # undone last: these were made with the GPU that is none
        loaded = package(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, loaded)
    return gpu


class _Kernels:
    def __init__(self, gpu: Gpu, kernels: HostKernels) -> None:
        self.gpu, self.kernels = gpu, kernels

    def compile_ahead(self, _: object) -> None:
        """There is nothing to wait for."""

    def prepare(self, launch: Any) -> Work:
        stream = self.gpu.current
        plain = {n: _by_address(a) if isinstance(a, DeviceArray) else a for n, a in launch.arguments.items()}
        work = replace(launch, arguments=plain)
        return lambda keep=launch: stream.put(lambda: self.kernels.run(work))


def _copies(gpu: Gpu, all_boxes: list[Box], stream: int) -> Work:
    """What the copy engine does, a box at a time."""

    def move(box: Box) -> None:
        for layer, row in product(range(box.layers), range(box.rows)):
            at, start = ((layer * side.height + side.y + row) * side.pitch for side in (box.target, box.source))
            ctypes.memmove(box.target.device + at, box.source.host + start, box.width)

    def start() -> None:
        gpu.boxes += len(all_boxes)
        for box in all_boxes:
            gpu.by_pointer(stream).put(partial(move, box))

    return start


class _Cublas:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, None

    def use_current_stream(self) -> None:
        self.stream = self.gpu.current

    def product(self, y: Any, x: Any, weight: Any, add: bool = False) -> Work:
        out, left, right = map(_by_address, (y, x, weight))

        def multiply() -> None:
            product = left.astype(np.float32) @ right.astype(np.float32).T
            out[...] = out + product if add else product

        return lambda keep=(y, x, weight): self.stream.put(multiply)


def _cupy(gpu: Gpu) -> dict[str, ModuleType]:
    """The modules, with no more of CuPy than slora_ref asks for."""

    def pinned(shape: Any, dtype: Any) -> np.ndarray:
        gpu.memory.append(np.zeros(shape, dtype))  # it stays: copies know it by its address
        return gpu.memory[-1]

    def as_it_is(array: DeviceArray, dtype: Any) -> DeviceArray:
        assert array.flags.c_contiguous and array.dtype == dtype, "nothing here is copied from device to device"
        return array

    def asnumpy(array: np.ndarray) -> np.ndarray:
        stream = gpu.current
        if not array.flags.c_contiguous:
            with stream:  # CuPy's copy that is contiguous; behind it, `use` is forgotten
                pass
        stream.synchronize()
        return np.array(array.view(np.ndarray))

    def move(to: int, source: int, nbytes: int, _: int, stream: int) -> None:
        gpu.by_pointer(stream).put(lambda: ctypes.memmove(to, source, nbytes) and None)

    class Group:
        def __init__(self, count: int, _: bytes, rank: int) -> None:
            assert (count, rank) == (1, 0), "one GPU is a group of one"

        def allReduce(self, *_: int) -> None:
            """The sum of one is itself, in its place."""

        def allGather(self, source: int, to: int, size: int, kind: int, stream: int) -> None:
            move(to, source, size * kind, 0, stream)

    numbers = {"NCCL_FLOAT32": 4, "NCCL_FLOAT16": 2, "NCCL_BFLOAT16": 2, "NCCL_SUM": 0}
    nccl = SimpleNamespace(get_unique_id=lambda: b"name", NcclCommunicator=Group, **numbers)
    def malloc(size: int) -> int:
        gpu.memory.append(np.zeros(size + BLOCK, np.uint8))
        return -(-gpu.memory[-1].ctypes.data // BLOCK) * BLOCK

    runtime = SimpleNamespace(
        malloc=malloc,
        memset=lambda *_: None,
        deviceSynchronize=lambda: None,
        ipcGetMemHandle=lambda address: address.to_bytes(64, "little"),
        ipcOpenMemHandle=lambda handle, _: int.from_bytes(handle, "little"),
        memcpyAsync=move,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        getDeviceCount=lambda: 1,
        memGetInfo=lambda: (1 << 34, 1 << 34),
        hostRegister=lambda *_: None,
        hostUnregister=lambda _: None,
        pointerGetAttributes=lambda _: SimpleNamespace(type=1),  # pinned, all of it
        CUDARuntimeError=OSError,
    )
    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        nccl=nccl,
        runtime=runtime,
        Stream=lambda **options: Stream(gpu, **options),
        Event=lambda **options: Event(gpu, **options),
        get_current_stream=lambda: gpu.current,
        get_elapsed_time=lambda *_: 0.0,
        Device=lambda *_: SimpleNamespace(id=0, use=lambda: None, compute_capability="90"),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        UnownedMemory=lambda address, size, _: (ctypes.c_char * size).from_address(address),
        MemoryPointer=lambda memory, _: memory,
    )
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    cupy.__dict__.update(
        cuda=cuda,
        ndarray=DeviceArray,
        empty=gpu.empty,
        zeros=lambda shape, dtype=np.float32: gpu.copy_of(np.zeros(shape, dtype)),
        asarray=gpu.copy_of,
        ascontiguousarray=as_it_is,
        asnumpy=asnumpy,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )
    cupyx.__dict__.update(zeros_pinned=pinned, empty_pinned=pinned)
    return {"cupy": cupy, "cupyx": cupyx, "cupy.cuda": cuda}
