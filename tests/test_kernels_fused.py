"""A kernel that does the work of two has the bits of those two. Its oracle is in test_kernels.py, like all others'."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import Case, bits
from kernel_shapes import fixed_cases
from test_kernels import ON_GPU, run

from slora_ref.ops import attention_arguments, lora_arguments

EACH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
BACKENDS = pytest.mark.parametrize("backend", ["forward", ON_GPU])


@EACH
@BACKENDS
def test_rope_store_expand_has_the_bits_of_expand_and_rope_store(dtype: str, backend: str) -> None:
    for case in fixed_cases("rope_store_expand", dtype):
        fused, names = case.arguments, ("pages", "cos", "sin", "positions", "k_pages", "v_pages")
        q_width, kv_width = (int(fused[name] * fused["head_dim"]) for name in ("heads", "kv_heads"))
        arrays = (fused[name] for name in ("qkv", "t", "pages", "page_table", "lora"))
        expand = lora_arguments.mbgmv_expand(*arrays, (q_width, kv_width, kv_width))
        qkv = run(backend, "mbgmv_expand_3_in_flight", Case("mbgmv_expand", dtype, expand, {}))["y"]
        rope = attention_arguments.rope_store(qkv, *(fused[name] for name in names))
        two = run(backend, "rope_store_2_vector", Case("rope_store", dtype, rope, {}))
        one = run(backend, "rope_store_expand_1_shuffles", case)
        np.testing.assert_array_equal(bits(one["pages"]), bits(two["pages"]))
        np.testing.assert_array_equal(bits(one["qkv"])[:, :q_width], bits(two["qkv"])[:, :q_width])


@EACH
@BACKENDS
def test_attention_has_the_same_bits_with_a_shrink_beside_it(dtype: str, backend: str) -> None:
    for case in fixed_cases("paged_attention_decode_shrink", dtype):
        own = ("t", "page_table", "lora", "width", "t_columns")
        decode = {name: value for name, value in case.arguments.items() if name not in own}
        alone = run(backend, "paged_attention_decode_3_in_flight", Case("paged_attention_decode", dtype, decode, {}))
        beside = run(backend, "paged_attention_decode_shrink_1_beside", case)
        np.testing.assert_array_equal(bits(beside["out"]), bits(alone["out"]))
