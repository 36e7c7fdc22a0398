"""The usual engine's parts for a checkpoint folder: real model, FCFS, adapters loaded on the spot, the real clock."""

from __future__ import annotations

import os
from pathlib import Path

from slora_ref.checkpoint import load_checkpoint
from slora_ref.clock import Clock, MonotonicClock
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.executor import Executor, ModelExecutor
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import ImmediateLoader, Prefetcher, ThreadLoader
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.tokenizer import Tokenizer

PAGE_ID_BYTES = 4
Parts = tuple[Scheduler, Prefetcher, Executor, Clock, ModelConfig, Tokenizer | None]


def build_parts(folder: Path, config: EngineConfig, policy: Policy | None = None) -> Parts:
    """What Engine takes, in its order.

    Raises:
        CheckpointError, UnsupportedModel, TokenizerError, ConfigError: see Engine.from_pretrained.
    """
    model_config = ModelConfig.from_folder(folder)
    weights = load_checkpoint(folder, model_config, config.dtype)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    pool = build_pool(model_config, config)
    model = LlamaModel(model_config, weights, NumpyOps(config.dtype), pool, pool.max_positions)
    background = config.loading == "background"
    share = config.share_host_copies
    store = AdapterStore(
        model_config, pool.layout, config.dtype, config.host_bytes, share=share, background=background
    )
    loader = ThreadLoader(pool, store) if background else ImmediateLoader(pool, store)
    prefetcher = Prefetcher(pool, store, loader, config.eviction, config.prefetch)
    scheduler = Scheduler(pool, prefetcher, policy or FCFS(), config)
    return scheduler, prefetcher, ModelExecutor(model), MonotonicClock(), model_config, tokenizer


def build_pool(model: ModelConfig, config: EngineConfig) -> PagePool:
    """The page pool that the options ask for.

    Raises:
        ConfigError: it could not hold a token of prompt and one of answer, max_length exceeds the model's, or the
            machine has not that much memory.
    """
    layout = PageLayout(model)
    page_bytes = layout.page_bytes(_itemsize(config.dtype))
    pages = config.pool_pages if config.pool_pages is not None else config.pool_bytes // page_bytes
    if pages < layout.token_pages(2):
        raise ConfigError(
            f"a pool of {pages} pages ({page_bytes} bytes each) cannot hold two tokens, which take "
            f"{layout.token_pages(2)}: raise pool_pages or pool_bytes"
        )
    longest = model.max_position_embeddings
    if config.max_length is not None and config.max_length > longest:
        raise ConfigError(f"max_length {config.max_length} is above the model's max_position_embeddings {longest}")
    in_pool = pages // layout.token_pages(1) + 1  # the last token of a sequence takes no pages
    positions = min(config.max_length or longest, in_pool)
    _check_memory(pages * page_bytes, config.max_running * layout.token_pages(positions) * PAGE_ID_BYTES)
    return PagePool(
        layout,
        num_pages=pages,
        max_sequences=config.max_running,
        max_positions=positions,
        max_adapters=config.max_adapters,
        dtype=config.dtype,
        poison=config.poison,
        shuffle_seed=config.page_order_seed,
    )


def _check_memory(storage: int, tables: int) -> None:
    """Raises ConfigError when the pool alone is more than this machine has; the system would end the process later."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if storage + tables > memory:
        raise ConfigError(
            f"the pool takes {storage / 1e9:,.1f} GB and the page tables of max_running sequences {tables / 1e9:,.1f} "
            f"GB; this machine has {memory / 1e9:,.1f} GB: lower pool_pages, pool_bytes, max_running or max_length"
        )


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "float64": 8}[dtype]
