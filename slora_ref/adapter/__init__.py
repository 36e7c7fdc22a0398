"""Adapters: a PEFT folder -> a checked header, and later its weights."""

from __future__ import annotations

from slora_ref.adapter.header import AdapterHeader, read_header
from slora_ref.adapter.load import Adapter, load_adapter

__all__ = ["Adapter", "AdapterHeader", "load_adapter", "read_header"]
