"""CudaKernels with a driver that writes down what it is given: what is packed once, what is checked each time."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import Gpu, install
from serving import host_kernels

from slora_ref.errors import KernelError
from slora_ref.ops.ladder import make_launch
from slora_ref.ops.launch import Launch
from slora_ref.ops.row_arguments import silu_mul

NAME, FFN = "silu_mul_2_vector", 16


class Driver:
    """Of a GPU that is none.

    Attributes:
        seen: of each launch its grid, its stream, and the addresses of out and gate_up.
        packed: how often a kernel's arguments were packed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: Gpu = install(monkeypatch, 0, host_kernels())
        module = importlib.reload(sys.modules["slora_ref.ops.cuda_kernels"])  # `install` has put another in its place
        self.seen: list[tuple[Any, ...]] = []
        self.packed: Counter[str] = Counter()
        self.error = 0
        monkeypatch.setattr(module.ctypes, "CDLL", lambda _: SimpleNamespace(cuLaunchKernelEx=self._launch))
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=7), max_dynamic_shared_size_bytes=0)
        monkeypatch.setattr(module.CudaKernels, "_compile", lambda *_: function)
        pack = module.CudaKernels._pack

        def counted(kernels: Any, launch: Launch, stream: int) -> Any:
            self.packed[launch.kernel] += 1
            return pack(kernels, launch, stream)

        monkeypatch.setattr(module.CudaKernels, "_pack", counted)
        self.kernels = module.CudaKernels()

    def _launch(self, config: Any, handle: ctypes.c_void_p, block: Any, _: None) -> int:
        assert handle.value == 7
        pointers = (ctypes.c_void_p * 2).from_buffer(block)
        addresses = [ctypes.c_void_p.from_address(pointer).value for pointer in pointers]
        self.seen.append((tuple(config._obj.grid), config._obj.stream, *addresses))
        return self.error

    def arrays(self, rows: int) -> tuple[Any, Any]:
        return self.gpu.empty((rows, FFN)), self.gpu.empty((rows, 2 * FFN))


def launch_of(out: Any, gate_up: Any) -> Launch:
    return make_launch(NAME, np.float32, silu_mul(out, gate_up))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_launches_that_are_packed_alike_have_each_their_own_addresses(driver: Driver) -> None:
    pairs = [driver.arrays(4) for _ in range(3)]
    works = [driver.kernels.prepare(launch_of(*pair)) for pair in pairs]
    for work in (works[1], works[0], works[2], works[1]):
        work()
    at = [tuple(array.data.ptr for array in pair) for pair in pairs]
    assert [seen[2:] for seen in driver.seen] == [at[1], at[0], at[2], at[1]] and len(set(at)) == 3
    assert driver.packed == {NAME: 1}


def test_other_sizes_or_another_stream_are_packed_anew(driver: Driver) -> None:
    driver.kernels.prepare(launch_of(*driver.arrays(4)))()
    driver.kernels.prepare(launch_of(*driver.arrays(5)))()
    with importlib.import_module("cupy").cuda.Stream() as other:
        driver.kernels.prepare(launch_of(*driver.arrays(4)))()
    assert [(grid[1], stream) for grid, stream, *_ in driver.seen] == [
        (4, driver.gpu.default.ptr),
        (5, driver.gpu.default.ptr),
        (4, other.ptr),
    ]
    assert driver.packed == {NAME: 3}


def test_each_array_is_checked_however_many_of_its_layout_fitted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, gate_up = driver.arrays(4)
    driver.kernels.prepare(launch_of(out, gate_up))
    shifted = driver.gpu.empty(4 * FFN + 1)[1:].reshape(4, FFN)
    with pytest.raises(KernelError, match=r"argument out: starts at 0x\w+, not at a multiple of 16 bytes"):
        driver.kernels.prepare(launch_of(shifted, gate_up))
    layout = {name: getattr(out, name) for name in ("shape", "strides", "dtype")}
    foreign = SimpleNamespace(**layout, data=SimpleNamespace(ptr=1 << 20, device_id=1), device=SimpleNamespace(id=1))
    with pytest.raises(KernelError, match="argument out: is on device 1, the kernels on 0"):
        driver.kernels.prepare(launch_of(foreign, gate_up))
    monkeypatch.setattr("cupy.cuda.runtime.pointerGetAttributes", lambda _: SimpleNamespace(type=0))
    with pytest.raises(KernelError, match="argument out: is in pageable host memory"):
        driver.kernels.prepare(launch_of(out, gate_up))


def test_a_launch_that_the_driver_refuses_is_named(driver: Driver) -> None:
    work = driver.kernels.prepare(launch_of(*driver.arrays(4)))
    driver.error = 9
    with pytest.raises(KernelError, match=f"{NAME}: the driver refuses the launch with error 9"):
        work()


def test_a_prepared_launch_is_few_objects(driver: Driver) -> None:
    """A step has hundreds, a server a hundred steps: Python's collector looks through them all while a GPU waits."""
    pair, count = driver.arrays(4), 100
    kept = [driver.kernels.prepare(launch_of(*pair))]
    gc.collect()
    before = len(gc.get_objects())
    kept += [driver.kernels.prepare(launch_of(*pair)) for _ in range(count)]
    gc.collect()
    assert len(gc.get_objects()) - before <= 6 * count
