"""Follower: a shard that does as the leader tells it. It has weights, pages and the model, but decides nothing."""

from __future__ import annotations

import numpy as np

from slora_ref.checkpoint import float_dtype
from slora_ref.config import EngineConfig
from slora_ref.engine.devices import open_device
from slora_ref.engine.leader import agree
from slora_ref.engine.opening import open_model
from slora_ref.engine.orders import Order, batch_of, names_same_file, told_sampling
from slora_ref.errors import AdapterError, SloraError
from slora_ref.executor import FollowingExecutor, KernelExecutor
from slora_ref.executor.timing import milliseconds
from slora_ref.model import LlamaModel
from slora_ref.pager import AdapterShape, PageLayout, PageStorage
from slora_ref.store import AdapterStore
from slora_ref.tp import local_config
from slora_ref.tp.communicator import Communicator


class Follower:
    """One shard of a model, after the order `open`.

    Args:
        communicator: of this shard.
        order: says where the weights come from, and the options.

    Raises:
        SloraError: the checkpoint cannot be read here.
    """

    def __init__(self, communicator: Communicator, order: Order) -> None:
        self.communicator, shard = communicator, communicator.shard
        self.config = EngineConfig(**order.values["config"])
        self.device = open_device(self.config, shard)
        self.model_config, self.weights = open_model(order, self.device, shard)
        self.device.prepare(local_config(self.model_config, shard.count), self.weights, self.config)
        self.layout = PageLayout(self.model_config, shard)
        dtype, host_bytes = float_dtype(self.config.dtype), self.config.host_bytes
        memory = self.device.host_memory
        self.store = AdapterStore(self.model_config, self.layout, dtype, host_bytes, allocate=memory)
        self.executor: FollowingExecutor | None = None

    def make_pool(self, order: Order) -> None:
        """Takes the memory of as many pages as the leader has."""
        config = self.config
        sizes = (order.values["pages"], config.max_running, order.values["positions"], config.max_adapters)
        dtype = float_dtype(config.dtype)
        self.pool = PageStorage(self.layout, *sizes, dtype, config.poison, self.device.empty)

    def join(self) -> None:
        """Makes the model, and what moves its arrays between all shards."""
        ops, moving = self.device.ops(), self.device.communicator(self.communicator)
        model = LlamaModel(self.model_config, self.weights, ops, self.pool, self.pool.max_positions, moving)
        self.executor, self.writer = self.device.following_parts(model, self.pool, self.config)

    def load(self, order: Order) -> None:
        """Reads this shard's part of an adapter into the pages that the leader has chosen.

        Raises:
            SloraError: the folder cannot be read, or is not what the leader has registered.
        """
        slot, pages = order.values["slot"], order.arrays["pages"]
        self.pool.enter_adapter(slot, pages, AdapterShape(order.arrays["ranks"], order.arrays["scales"]))
        self.writer.make_room(slot)  # whatever comes of it: the sizes of a step must be equal on all shards
        version = self.store.add(order.values["folder"], order.values["folder"])
        try:
            if not names_same_file(order, version.header.fingerprint):
                raise AdapterError("the folder is not the one that shard 0 has registered: has it changed?")
            self.writer.write(slot, self.store.image(version.adapter_id))
        finally:
            self.store.forget(self.store.remove(version.name))

    def time(self, order: Order) -> None:
        """Repeats parts of the last step as often as shard 0 does, which measures them."""
        assert isinstance(self.executor, KernelExecutor), "only launches are kept"
        milliseconds(self.executor, order.values["parts"])

    def run(self, order: Order) -> None:
        """Starts one step, which samples the same tokens as the leader's."""
        batch = batch_of(order)
        slots = np.repeat(batch.spans.slot, batch.spans.length)
        self.pool.enter_rows(slots, batch.positions, batch.k_pages, batch.v_pages)
        assert self.executor is not None, "`join` comes before `run`"
        self.executor.follow(batch, told_sampling(order))

    def finish(self) -> None:
        """Waits for the steps that were started: shard 0 may not have read them yet."""
        if self.executor is not None:
            self.executor.wait()


def follow(communicator: Communicator) -> None:
    """Obeys shard 0 until it says stop, and leaves when the steps that were started have ended.

    Whatever fails, but a load, ends the group.

    Raises:
        ShardLost: another shard has died or failed.
    """
    follower: Follower | None = None
    try:
        while (order := Order.decode(communicator.broadcast())).kind != "stop":
            if order.kind in ("run", "time"):
                assert follower is not None, "the first order is `open`"
                (follower.run if order.kind == "run" else follower.time)(order)
            else:
                failure: str | None = None
                try:
                    follower = _prepare(communicator, follower, order)
                except (SloraError, OSError, MemoryError) as error:
                    failure = str(error) or repr(error)
                agree(communicator, failure)
        if follower is not None:
            follower.finish()
    except BaseException as error:
        communicator.fail(f"shard {communicator.shard.index} failed: {error!r}")
        raise


def _prepare(communicator: Communicator, follower: Follower | None, order: Order) -> Follower:
    """Obeys an order on whose success all shards must agree."""
    if order.kind == "open":
        return Follower(communicator, order)
    assert follower is not None, "the first order is `open`"
    if order.kind == "pool":
        follower.make_pool(order)
    elif order.kind == "join":
        follower.join()
    else:
        follower.load(order)
    return follower
