"""The block that the driver takes, read as the driver reads it; and products, as cuBLAS does."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import install
from serving import host_kernels

from slora_ref.ops.cuda_call import PackedCall

ARGUMENTS: dict[str, Any] = {
    "first": np.zeros(4, np.float32),
    "absent": None,
    "small": np.int32(-7),
    "large": np.int64(-(1 << 40)),
    "eps": np.float32(1e-5),
    "last": np.zeros(2, np.float16),
}
KINDS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p)


def received(log: list[list[Any]]) -> Callable[..., int]:
    """A driver that writes down what the pointers point to."""

    def call(block: Any, extra: None) -> int:
        pointers = (ctypes.c_void_p * len(KINDS)).from_buffer(block)
        log.append([kind.from_address(at).value for kind, at in zip(KINDS, pointers, strict=True)])
        return 0

    return call


def test_the_driver_finds_each_argument_where_its_pointer_says() -> None:
    log: list[list[Any]] = []
    packed = PackedCall(received(log), ARGUMENTS)
    assert packed.arrays == ["first", "last"]
    one, other = packed.block([1 << 47, 0x200]), packed.block([0x300, (1 << 64) - 16])
    for block in (one, other, one):
        assert packed.call(block, None) == 0
    scalars = [-7, -(1 << 40), np.float32(1e-5)]
    want = [[1 << 47, None, *scalars, 0x200], [0x300, None, *scalars, (1 << 64) - 16]]
    assert log == [want[0], want[1], want[0]]
    with pytest.raises(ValueError, match="zip"):
        packed.block([1])


def matrix(at: int, kind: int, rows: int, columns: int, leading: int) -> np.ndarray:
    """Of float32, as cuBLAS counts: column by column, `leading` numbers apart."""
    assert kind == 0
    memory = (ctypes.c_float * (leading * columns)).from_address(at)
    return np.frombuffer(memory, np.float32).reshape(columns, leading).T[:rows]


def cublas(*arguments: Any) -> int:
    """cublasGemmEx, by its definition: C = alpha op(A) op(B) + beta C."""
    _, turn_a, turn_b, m, n, k, alpha, a, a_kind, lda, b, b_kind, ldb, beta, c, c_kind, ldc, *how = arguments
    assert how == [68, -1] and all(isinstance(value, int) for value in arguments[1:])
    left = matrix(a, a_kind, *((k, m) if turn_a else (m, k)), lda)
    right = matrix(b, b_kind, *((n, k) if turn_b else (k, n)), ldb)
    left, right = left.T if turn_a else left, right.T if turn_b else right
    factors = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]
    out = matrix(c, c_kind, m, n, ldc)
    out[...] = factors[0] * (left @ right) + factors[1] * out
    return 0


@pytest.mark.parametrize("add", [False, True])
def test_cublas_is_told_the_product(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of y, of x and of the weight further apart than they are long."""
    gpu = install(monkeypatch, 0, host_kernels())
    module = importlib.import_module("slora_ref.ops.cuda_blas")
    signatures = {name: SimpleNamespace() for name in module.SIGNATURES}
    monkeypatch.setattr(module, "_library", lambda: SimpleNamespace(**signatures, cublasCreate_v2=lambda _: 0))
    monkeypatch.setattr("cupy.ones", gpu.empty, raising=False)
    monkeypatch.setattr("cupy.matmul", lambda *_: None, raising=False)
    library = module.Cublas()
    random = np.random.default_rng(0)
    wide = [random.standard_normal((rows, 9)).astype(np.float32) for rows in (3, 3, 4)]
    y, x, weight = (gpu.copy_of(array) for array in wide)
    gpu.current.synchronize()
    y, x, weight = y[:, :4], x[:, :6], weight[:, :6]
    before = np.array(y)
    library.library.cublasGemmEx = cublas
    library.product(y, x, weight, add)()
    want = np.array(x) @ np.array(weight).T + (before if add else 0)
    np.testing.assert_allclose(np.array(y), want, rtol=1e-5)
    assert len(signatures["cublasGemmEx"].argtypes) == 19
