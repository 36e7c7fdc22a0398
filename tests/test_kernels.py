"""Every operation x rung x backend against a float64 oracle, and what must hold whatever the rung.

On the CPU the kernels run through g++, the threads of a block in three orders. On a GPU (marked gpu) they run as they
are. Shapes come from kernel_shapes.py, oracles from kernel_cases.py.
"""

from __future__ import annotations

import functools
from typing import Any

import kernel_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, LoraShape
from kernel_shapes import drawn_cases, fixed_cases

from slora_ref.kernels import kernels_folder
from slora_ref.ops.host_kernels import ORDERS, HostKernels
from slora_ref.ops.rungs import RUNGS, make_launch, operation_of

KERNELS = [(kernel, dtype) for kernel, rung in RUNGS.items() for dtype in rung.dtypes]
EACH_KERNEL = pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=lambda value: value)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@functools.cache
def host() -> HostKernels:
    return HostKernels()


@functools.cache
def cuda() -> Any:
    from slora_ref.ops.cuda_kernels import CudaKernels

    return CudaKernels()


def run(backend: str, kernel: str, case: Case) -> dict[str, Any]:
    """The arguments after a run on copies of the case's; `backend` is an order of threads, or cuda."""
    arguments = case.copy()
    if backend == "cuda":
        from kernel_device import on_device

        return on_device(arguments, lambda device: cuda().run(make_launch(kernel, case.dtype, device)))
    host().run(make_launch(kernel, case.dtype, arguments), backend, seed=1)
    return arguments


def test_the_ladder_is_what_lies_in_the_folder() -> None:
    assert set(RUNGS) == {path.stem for path in kernels_folder().glob("*.cu")}


@EACH_KERNEL
@pytest.mark.parametrize("backend", ["cpu", ON_GPU])
def test_fixed_shapes(backend: str, kernel: str, dtype: str) -> None:
    for case in fixed_cases(operation_of(kernel), dtype):
        for each in ORDERS if backend == "cpu" else (backend,):
            case.check(run(each, kernel, case))


@EACH_KERNEL
@pytest.mark.parametrize("backend", ["cpu", ON_GPU])
@given(data=st.data())
@settings(max_examples=20)
def test_drawn_shapes(backend: str, kernel: str, dtype: str, data: Any) -> None:
    case = data.draw(drawn_cases(operation_of(kernel), dtype))()
    for each in ORDERS if backend == "cpu" else (backend,):
        case.check(run(each, kernel, case))


LORA = [pair for pair in KERNELS if pair[0].startswith("mbgm")]


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _ in LORA}))
@pytest.mark.parametrize(("d_in", "d_out"), [(4096, 4096), (4096, 11008), (11008, 4096)])
def test_the_widths_of_a_real_model(kernel: str, d_in: int, d_out: int) -> None:
    shape = LoraShape(4096, d_in, (d_out,), [[8], [3]], [(0, 2), (1, 1), (-1, 1)])
    case = cases.lora_case(operation_of(kernel), "float16", 5, shape)
    case.check(run("forward", kernel, case))
