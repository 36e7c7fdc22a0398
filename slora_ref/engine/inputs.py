"""From what a caller passes to Requests: encoding, all checks possible before the queue, and sampling arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import index
from typing import Any

import numpy as np

from slora_ref.config import ModelConfig
from slora_ref.errors import RequestError
from slora_ref.request import Request, SamplingParams, Sequence
from slora_ref.sampler import Sampling
from slora_ref.tokenizer import Tokenizer

Prompt = str | Seq[int]


def make_request(
    prompt: Prompt,
    params: SamplingParams,
    adapter: str | None,
    arrival: float,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    max_length: int,
) -> Request:
    """Encodes and checks one prompt.

    Raises:
        RequestError: no tokenizer for a text, an empty prompt, a token that is no integer or outside the vocabulary, or
        too long; with the numbers.
    """
    encoded = _encode(prompt, tokenizer)
    try:
        ids = tuple(map(index, encoded))
    except TypeError:
        raise RequestError(f"a prompt is a text or a sequence of token ids, not {prompt!r:.80}") from None
    if not ids:
        raise RequestError("the prompt has no tokens; give at least one")
    if not all(0 <= token < config.vocab_size for token in ids):
        bad = next(token for token in ids if not 0 <= token < config.vocab_size)
        raise RequestError(f"prompt token {bad} is outside the vocabulary 0 .. {config.vocab_size - 1}")
    if len(ids) + params.max_tokens > max_length:
        raise RequestError(
            f"prompt of {len(ids)} tokens + max_tokens {params.max_tokens} exceeds the longest sequence, {max_length} "
            "tokens: shorten one, or raise max_length (the model's max_position_embeddings and the pool are its limits)"
        )
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer; this engine has none: use stop_token_ids")
    return Request(prompt_ids=ids, params=params, adapter=adapter, arrival=arrival)


def _encode(prompt: Prompt, tokenizer: Tokenizer | None) -> Seq[int]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise RequestError("the model folder has no tokenizer.json: give the prompt as token ids")
    ids: Seq[int] = tokenizer.encode(prompt)
    return ids


def one_for_each(value: Any, count: int, what: str) -> list[Any]:
    """A list of `count` values, from one for all or from a sequence of one for each.

    Raises:
        RequestError: a sequence of another length.
    """
    if isinstance(value, str) or not isinstance(value, Seq):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} {what} for {count} prompts: give one, or one for each")
    return list(value)


def seed_of(params: SamplingParams, engine_seed: int, number: int) -> int:
    """The request's own seed, or one drawn from the engine's seed and the request's number."""
    if params.seed is not None:
        return params.seed
    return int(np.random.SeedSequence((engine_seed, number)).generate_state(1, np.uint64)[0])


def sampling_of(sequences: Seq[Sequence]) -> Sampling:
    """The sampling parameters of a step's sampled rows as arrays."""
    params = [sequence.request.params for sequence in sequences]
    return Sampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        seeds=tuple(sequence.seed for sequence in sequences),
        positions=tuple(len(sequence.tokens) for sequence in sequences),
    )
