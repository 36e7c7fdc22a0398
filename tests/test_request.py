"""Parameters of requests and options of engines: of the right kind and in bounds, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slora_ref.config import EngineConfig
from slora_ref.errors import ConfigError, RequestError
from slora_ref.request import Request, SamplingParams, Sequence

WRONG_PARAMS: list[dict[str, Any]] = [
    *({"max_tokens": value} for value in (0, -1, 1.5, True, "3", None, 10**30)),
    *({"temperature": value} for value in (-0.1, float("nan"), float("inf"), "1", None, True, 10**400)),
    *({"top_k": value} for value in (-1, 1.5, 10**30, None)),
    *({"top_p": value} for value in (0, 1.1, -1, float("nan"), "x")),
    *({"min_p": value} for value in (-0.1, 1.1, None)),
    *({"seed": value} for value in (-1, 1 << 64, 1.5, "x")),
    *({"logprobs": value} for value in (-1, 1.5, "x")),
    *({"stop": value} for value in ("end", ("",), (5,), b"ab", None)),
    *({"stop_token_ids": value} for value in (5, ("a",), "1", (-1,), None)),
    *({name: value} for name in ("ignore_eos", "keep_logits") for value in ("x", None, 1)),
]
WRONG_OPTIONS: list[dict[str, Any]] = [
    *({"seed": value} for value in (-1, "a", None, 1.5)),
    *({"pool_pages": value} for value in ("a", float("nan"), 10**13, 0, -5)),
    *({"pool_bytes": value} for value in (0, 1 << 55, 1.5)),
    *({"max_adapters": value} for value in (0, 10**10)),
    *({"max_running": value} for value in (0, 10**9, 512)),
    *({"max_batched_tokens": value} for value in (0, 128, "x")),
    *({"max_length": value} for value in (0, 2.5)),
    *({"join_every": value} for value in (0, 1.5, "x")),
    *({name: value} for name in ("chunked_prefill", "separate_prefill", "poison") for value in ("no", None, 1)),
    *({name: "x"} for name in ("device", "dtype", "admission", "eviction")),
    *({"page_order_seed": value} for value in (-1, 1.5)),
]


@pytest.mark.parametrize("wrong", WRONG_PARAMS, ids=str)
def test_a_wrong_parameter_is_refused_by_name_before_it_can_break_a_step(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", WRONG_OPTIONS, ids=str)
def test_a_wrong_option_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_numbers_of_numpy_and_lists_will_do() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop=["a"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a",), (1, 2))
    assert EngineConfig(pool_pages=np.int32(100)).pool_pages == 100


def test_a_sequence_counts_its_tokens() -> None:
    sequence = Sequence(0, Request(prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4)), -1, seed=0)
    assert (sequence.uncomputed, sequence.tokens_left, sequence.peak_tokens) == (3, 4, 6)
    sequence.tokens.append(9)
    sequence.computed = 3
    assert (sequence.uncomputed, sequence.tokens_left, sequence.output_ids) == (1, 3, [9])
