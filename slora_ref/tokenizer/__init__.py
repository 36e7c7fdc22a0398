"""Tokenizer: text to ids and back, whole or as a stream."""

from __future__ import annotations

from slora_ref.tokenizer.stream import IncrementalDecoder
from slora_ref.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer"]
