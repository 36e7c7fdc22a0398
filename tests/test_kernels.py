"""Every operation x rung x backend against a float64 oracle, and what must hold whatever the rung.

On the CPU the kernels run through g++, the threads of a block in three orders. On a GPU (marked gpu) they run as they
are. Shapes come from kernel_shapes.py, oracles from kernel_cases.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, LoraShape
from kernel_shapes import drawn_cases, fixed_cases

from slora_ref.kernels import kernels_folder
from slora_ref.ops.host_kernels import ORDERS, HostKernels
from slora_ref.ops.ladder import fastest, make_launch, operation_of
from slora_ref.ops.rungs import RUNGS

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


LORA = [pair for pair in KERNELS if pair[0].startswith(cases.LORA)]


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, _ in LORA}))
@pytest.mark.parametrize(("d_in", "d_out"), [(4096, 4096), (4096, 11008), (11008, 4096)])
def test_the_widths_of_a_real_model(kernel: str, d_in: int, d_out: int) -> None:
    shape = LoraShape(4096, d_in, (d_out,), [[8], [3]], [(0, 2), (1, 1), (-1, 1)])
    case = cases.lora_case(operation_of(kernel), "float16", 5, shape)
    case.check(run("forward", kernel, case))


ATTENTION = [(k, d) for k, d in KERNELS if k.startswith(("paged_attention_decode", "paged_attention_prefill"))]


@pytest.mark.parametrize(("kernel", "dtype"), ATTENTION, ids=lambda value: value)
def test_a_long_context(kernel: str, dtype: str) -> None:
    """Many times what a block takes at a time; and a few rows behind a long prefix that was prefilled before."""
    if operation_of(kernel).endswith("decode"):
        case = cases.decode_case(dtype, 9, 1, 2, 64, (1500, 3), 2)
    else:
        case = cases.prefill_case(dtype, 9, 1, 2, 64, ((5, 900), (2, 2)))
    case.check(run("forward", kernel, case))


# --- a row's bits do not depend on other rows, on the segment's length or on the order of pages ---

ORDERED = (*cases.LORA, "paged_attention_decode", "paged_attention_prefill")
BITWISE = [(kernel, dtype) for kernel, dtype in KERNELS if kernel.startswith(ORDERED)]
EACH_BITWISE = pytest.mark.parametrize(("kernel", "dtype"), BITWISE, ids=lambda value: value)
OUTPUT = {"shrink": "t", "expand": "y", "decode": "out", "prefill": "out"}
MANY = LoraShape(48, 200, (130, 40), [[17, 5], [3, 40]], [(0, 9), (1, 1), (-1, 1), (1, 13)], splits=2)


def bitwise_case(operation: str, dtype: str) -> Case:
    if operation.startswith(cases.LORA):
        return cases.lora_case(operation, dtype, 7, MANY)
    if operation.endswith("decode"):
        return cases.decode_case(dtype, 7, 2, 2, 64, (150, 31, 90), 1)
    return cases.prefill_case(dtype, 7, 2, 2, 64, ((9, 150), (12, 12)))


def row_bits(kernel: str, arguments: dict[str, Any], row: int) -> bytes:
    name = OUTPUT[operation_of(kernel).rpartition("_")[2]]
    array = np.ascontiguousarray(arguments[name][:, row] if name == "t" else arguments[name][row])
    return array.tobytes()


@EACH_BITWISE
def test_bits_do_not_depend_on_the_order_of_pages(kernel: str, dtype: str) -> None:
    case = bitwise_case(operation_of(kernel), dtype)
    moved = case.copy()
    order = np.random.default_rng(0).permutation(len(moved["pages"]))
    moved["pages"][order] = case.arguments["pages"]
    ids = "page_table" if "page_table" in moved else "sequence_pages"
    moved[ids] = np.where(moved[ids] >= 0, order[moved[ids]], -1).astype(np.int32)
    before = run("forward", kernel, case)
    after = run("forward", kernel, replace(case, arguments=moved))
    rows = range(case.want[next(iter(case.want))].shape[0])
    assert [row_bits(kernel, before, row) for row in rows] == [row_bits(kernel, after, row) for row in rows]


@EACH_BITWISE
def test_bits_do_not_depend_on_other_rows(kernel: str, dtype: str) -> None:
    """Each entry of the step (a row, or a tile cut to one row) alone gives the bits that it has among the others."""
    case = bitwise_case(operation_of(kernel), dtype)
    together = run("forward", kernel, case)
    names = [name for name in ("lora", "tiles", "queries") if name in case.arguments]
    count = case.arguments[names[0]].shape[1 if names[0] == "lora" else 0]
    for entry in range(count):
        alone = case.copy()
        row = entry
        if "lora" in alone:
            others = np.arange(count) != entry
            alone["lora"][:, others] = 0
        if "queries" in alone:
            alone["queries"][np.arange(count) != entry] = (-1, 0)
        if "tiles" in alone:
            alone["tiles"][np.arange(count) != entry] = 0
            if not alone["tiles"][entry, 1]:
                continue
            last = alone["tiles"][entry, 1] - 1
            alone["tiles"][entry, 0] += last
            alone["tiles"][entry, 1] = 1
            alone["tiles"][entry, 3:] += last
            row = alone["tiles"][entry, 0]
        after = run("forward", kernel, replace(case, arguments=alone))
        assert row_bits(kernel, after, row) == row_bits(kernel, together, row), f"entry {entry}"


@pytest.mark.parametrize(
    ("rank", "rows", "width", "length"),
    [
        *((rank, rows, 512, 512) for rank in (5, 24, 64, 128) for rows in (2, 40)),
        *((5, 2, width, 4200) for width in (520, 2048, 4200)),  # several pages, one of them odd; more than one pass
    ],
)
@pytest.mark.parametrize("half", ["shrink", "expand"])
def test_a_row_alone_has_the_same_bits_in_both_launches(
    half: str, rank: int, rows: int, width: int, length: int
) -> None:
    """Whether other rows of a step share an adapter decides between MBGMV's launch and the one for both."""
    shape = LoraShape(width, length, (length,), [[rank]] * rows, [(adapter, 1) for adapter in range(rows)])
    both = cases.lora_case(f"lora_{half}", "float16", 3, shape)
    alone = cases.lora_case(f"mbgmv_{half}", "float16", 4, shape)
    arrays = {name: both.arguments[name].copy() for name in alone.arguments.keys() & both.arguments.keys() - {"lora"}}
    entries, used = np.zeros_like(alone.arguments["lora"]), both.arguments["tiles"][:, 1] > 0
    entries[:, both.arguments["tiles"][used, 0]] = both.arguments["lora"][:, used]
    bits = []
    for case in (both, replace(alone, arguments=alone.arguments | arrays | {"lora": entries})):
        kernel = fastest(case.operation, "float16", case.arguments)
        after = run("forward", kernel, case)
        bits.append([row_bits(kernel, after, row) for row in range(rows)])
    assert bits[0] == bits[1]


@pytest.mark.parametrize("power", [-24, 20])
@pytest.mark.parametrize(("kernel", "dtype"), [pair for pair in LORA if "expand" in pair[0]], ids=lambda value: value)
def test_the_intermediate_may_be_what_a_half_cannot_hold(kernel: str, dtype: str, power: int) -> None:
    """x = 8, A = 4 and a width of 4096 make t = 131072, float16 ends at 65504: t is float32, whatever the storage."""
    case = cases.lora_case(operation_of(kernel), dtype, 3, MANY)
    case.arguments["t"] *= np.float32(2.0**power)
    case.arguments["lora"].view(np.float32)[..., 3] *= np.float32(2.0**-power)
    case.check(run("forward", kernel, case))
