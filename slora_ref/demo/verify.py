"""Checks every answer of the demo against the dense model with that adapter merged, one request at a time.

The dense model computes in float64, so that the logit error is that of the served logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slora_ref.adapter import load_adapter, read_header
from slora_ref.checkpoint import load_checkpoint
from slora_ref.config import ModelConfig
from slora_ref.engine import Completion
from slora_ref.reference import Reference
from slora_ref.request import FinishReason


@dataclass(frozen=True)
class Verdict:
    """One answer beside the dense model's.

    Args:
        right: the tokens are the dense model's greedy answer, from the first to the one that ends it.
        logit_error: largest absolute difference of any logit at any position, prompt included.
    """

    right: bool
    logit_error: float


TOLERANCES = {"float64": 0.0, "float32": 0.0, "float16": 0.02, "bfloat16": 0.1}
"""By dtype, how much of the largest logit rounding may move one: where two are nearer, either token is right."""
WRONG = Verdict(right=False, logit_error=float("inf"))


class Verifier:
    """Dense models, W + s B A, one for each trained adapter that was asked for.

    Args:
        model_folder: the base model.
        longest_answer: tokens after which an answer is cut (max_tokens of every request).
        tolerance: share of the largest logit by which the dense model may prefer another token.
    """

    def __init__(self, model_folder: Path, longest_answer: int, tolerance: float = 0.0) -> None:
        self._config = ModelConfig.from_folder(model_folder)
        self._weights = load_checkpoint(model_folder, self._config, np.float32)
        self._merged: dict[Path, Reference] = {}
        self._longest, self._tolerance = longest_answer, tolerance

    def _reference(self, adapter_folder: Path) -> Reference:
        if adapter_folder not in self._merged:
            header = read_header(adapter_folder, self._config)
            adapter = load_adapter(header, self._config, np.float32)
            self._merged[adapter_folder] = Reference(self._config, self._weights, adapter, np.float64)
        return self._merged[adapter_folder]

    def check(self, completion: Completion, adapter_folder: Path) -> Verdict:
        """Compares an answer (with its logits kept) token by token and logit by logit.

        If at every place the dense model, given the same text so far, prefers the token that was answered, and the
        answer goes on to an end token or to its full length, then it is the dense model's greedy answer: one pass over
        the whole text decides.
        """
        if completion.error is not None or not completion.token_ids or not completion.logits:
            return WRONG
        ids = [*completion.prompt_ids, *completion.token_ids]
        dense = self._reference(adapter_folder).logits(ids[:-1])
        served = np.stack(completion.logits)
        if served.shape != dense.shape:
            return WRONG
        answered = dense[len(completion.prompt_ids) - 1 :]
        chosen = answered[np.arange(len(answered)), list(completion.token_ids)]
        near = answered.max(axis=1) - chosen <= self._tolerance * np.abs(answered).max(axis=1)
        right = bool(near.all()) and self._ended(completion)
        return Verdict(right, float(np.abs(served - dense).max()))

    def _ended(self, completion: Completion) -> bool:
        """Whether the answer goes to its first end token or to its full length, and says so. What was cut short or
        aborted does neither.
        """
        *before, last = completion.token_ids
        ends = self._config.eos_token_ids
        if any(token in ends for token in before):
            return False
        if last in ends:
            return completion.finish_reason is FinishReason.STOP
        return completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == self._longest
