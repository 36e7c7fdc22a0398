"""What the attention cases of `bench kernels` claim to move and to compute, counted one by one."""

from __future__ import annotations

import pytest

from slora_ref.bench.kernels.attention_cases import AttentionCase, attention_cases


@pytest.mark.parametrize(("batch", "context", "floor"), [(64, 512, 128), (128, 2048, 1023), (4, 4096, 64)])
def test_floors_are_those_of_the_tables_that_results_are_compared_with(batch: int, context: int, floor: int) -> None:
    """Bytes of keys and values at 4.2 TB/s, in whole microseconds; queries and results are less than one."""
    assert round(AttentionCase("attention_decode", batch, context).floor_us) == floor


@pytest.mark.parametrize("case", attention_cases(), ids=lambda case: f"{case.case}-{case.batch}x{case.context}")
def test_each_query_sees_the_tokens_up_to_its_own(case: AttentionCase) -> None:
    spans = case.spans(3)
    seen = sum(int(spans.context[0]) - case.length + i + 1 for i in range(case.length)) * case.batch
    assert case.flops == 4 * seen * case.heads * case.head_dim
    assert spans.start.tolist() == [case.length * i for i in range(case.batch)]
    assert case.rows == spans.length.sum()
    assert case.rows == case.batch or case.case == "attention_prefill"
