"""The usual engine's parts: real model, FCFS, the real clock; for a checkpoint folder, or with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slora_ref.checkpoint import ModelWeights, float_dtype
from slora_ref.clock import Clock, MonotonicClock
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine.devices import Device, open_device
from slora_ref.engine.group import open_group, pool_order
from slora_ref.engine.leader import GroupExecutor, GroupLoader, Leader
from slora_ref.engine.opening import folder_order, open_model, random_order
from slora_ref.engine.orders import Order
from slora_ref.errors import ConfigError
from slora_ref.executor import Executor
from slora_ref.model import LlamaModel
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import Prefetcher
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.tokenizer import Tokenizer
from slora_ref.tp import WHOLE, Shard, local_config
from slora_ref.tp.communicator import Alone

PAGE_ID_BYTES = 4
Note = Callable[[str], None]
"""Takes the name of the part of the start that begins."""
MakePool = Callable[..., PagePool]  # takes what PagePool takes
Parts = tuple[Scheduler, Prefetcher, Executor, Clock, ModelConfig, Tokenizer | None]


def quiet(part: str) -> None:
    """Says nothing."""


def build_parts(folder: Path, config: EngineConfig, policy: Policy | None = None, note: Note = quiet) -> Parts:
    """What Engine takes, in its order, for a checkpoint folder.

    Raises:
        CheckpointError, UnsupportedModel, TokenizerError, ConfigError: see Engine.from_pretrained.
    """
    model = ModelConfig.from_folder(folder)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    return build_group(model, folder_order(folder, config), tokenizer, config, policy, note)


def build_random_parts(
    model: ModelConfig, config: EngineConfig, seed: int, policy: Policy | None = None, note: Note = quiet
) -> Parts:
    """What Engine takes, in its order, with weights from a seed and without a tokenizer.

    Raises:
        ConfigError: see Engine.from_config.
    """
    return build_group(model, random_order(model, seed, config), None, config, policy, note)


def build_group(
    model: ModelConfig,
    order: Order,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    policy: Policy | None,
    note: Note = quiet,
) -> Parts:
    """The parts of shard 0, after all shards have done what the order to open a model says."""
    note("device")
    leader = open_group(model, config)
    shard = leader.communicator.shard
    device = open_device(config, shard)
    note("weights")
    with leader.together(order):
        _, weights = open_model(order, device, shard)
    return assemble(model, weights, tokenizer, device, config, policy, leader, note)


def assemble(
    model: ModelConfig,
    weights: ModelWeights,
    tokenizer: Tokenizer | None,
    device: Device,
    config: EngineConfig,
    policy: Policy | None = None,
    leader: Leader | None = None,
    note: Note = quiet,
    make_pool: MakePool = PagePool,
) -> Parts:
    """The parts around weights that are on the device already; those of the leader's shard, if there is one."""
    leader = leader or Leader(Alone(), stops=False)
    communicator = leader.communicator
    note("warm-up")
    device.prepare(local_config(model, config.shards), weights, config)
    note("pool")
    pool = build_pool(model, config, device, communicator.shard, make_pool)
    with leader.together(pool_order(pool)):
        pass
    with leader.together(Order("join")):
        moving = device.communicator(communicator)
        llama = LlamaModel(model, weights, device.ops(), pool, pool.max_positions, moving)
    how = {"share": config.share_host_copies, "background": config.loading == "background"}
    note("host memory")
    store = AdapterStore(model, pool.layout, config.dtype, config.host_bytes, allocate=device.host_memory, **how)
    executor, loader = device.parts(llama, pool, store, config)
    if config.shards > 1:
        executor, loader = GroupExecutor(leader, executor), GroupLoader(leader, loader, pool, store)
    prefetcher = Prefetcher(pool, store, loader, config.eviction, config.prefetch)
    scheduler = Scheduler(pool, prefetcher, policy or FCFS(), config)
    return scheduler, prefetcher, executor, MonotonicClock(), model, tokenizer


def build_pool(
    model: ModelConfig,
    config: EngineConfig,
    device: Device,
    shard: Shard = WHOLE,
    make_pool: MakePool = PagePool,
) -> PagePool:
    """The page pool that the options ask for.

    Raises:
        ConfigError: it could not hold a token of prompt and one of answer, max_length exceeds the model's, or the
            device has not that much memory.
    """
    layout, dtype = PageLayout(model, shard), float_dtype(config.dtype)
    page_bytes = layout.page_bytes(dtype.itemsize)
    pages = config.pool_pages
    if pages is None:
        room = config.pool_bytes if config.pool_bytes is not None else device.pool_bytes(config)
        pages = max(0, room) // page_bytes
    if pages < layout.token_pages(2):
        raise ConfigError(
            f"a pool of {pages} pages ({page_bytes} bytes each) cannot hold two tokens, which take "
            f"{layout.token_pages(2)}: raise pool_pages, pool_bytes or memory_fraction, or take a smaller model"
        )
    longest = model.max_position_embeddings
    if config.max_length is not None and config.max_length > longest:
        raise ConfigError(f"max_length {config.max_length} is above the model's max_position_embeddings {longest}")
    in_pool = pages // layout.token_pages(1) + 1  # the last token of a sequence takes no pages
    positions = min(config.max_length or longest, in_pool)
    tables = config.max_running * layout.token_pages(positions) * PAGE_ID_BYTES
    _check_memory(pages * page_bytes, tables, device.memory_bytes())
    try:
        return make_pool(
            layout,
            num_pages=pages,
            max_sequences=config.max_running,
            max_positions=positions,
            max_adapters=config.max_adapters,
            dtype=dtype,
            poison=config.poison,
            shuffle_seed=config.page_order_seed,
            empty=device.empty,
        )
    except MemoryError as error:
        raise ConfigError(f"the pool of {pages * page_bytes / 1e9:,.1f} GB does not fit: {error}") from None


def _check_memory(storage: int, tables: int, memory: int) -> None:
    """Raises ConfigError when the pool alone is more than the device has; the system would end the process later."""
    if storage + tables > memory:
        raise ConfigError(
            f"the pool takes {storage / 1e9:,.1f} GB and the page tables of max_running sequences {tables / 1e9:,.1f} "
            f"GB; this machine has {memory / 1e9:,.1f} GB: lower pool_pages, pool_bytes, max_running or max_length"
        )
