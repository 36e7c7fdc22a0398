"""Opens the group of shards that the options ask for: threads, processes of mpirun, or processes of its own."""

from __future__ import annotations

import contextlib
import threading

from slora_ref.checkpoint import float_dtype
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine.follower import follow
from slora_ref.engine.leader import Leader
from slora_ref.engine.orders import Order
from slora_ref.errors import ConfigError
from slora_ref.pager import PagePool
from slora_ref.pager.layout import ROW_ALIGNMENT_BYTES
from slora_ref.tp import check_split
from slora_ref.tp.communicator import Alone, Communicator
from slora_ref.tp.mpi import MpiCommunicator
from slora_ref.tp.processes import start_processes
from slora_ref.tp.threads import thread_communicators


def open_group(model: ModelConfig, config: EngineConfig) -> Leader:
    """This process as the leader of so many shards.

    Raises:
        ConfigError: the model cannot be split so, or there are not so many processes.
    """
    multiple = ROW_ALIGNMENT_BYTES // float_dtype(config.dtype).itemsize if config.device == "cuda" else 1
    check_split(model, config.shards, multiple)
    return Leader(_communicator(config), stops=config.communicator != "mpi")


def pool_order(pool: PagePool) -> Order:
    """The order to take the memory of so many pages."""
    return Order("pool", {"pages": pool.num_pages, "positions": pool.max_positions})


def _communicator(config: EngineConfig) -> Communicator:
    if config.shards == 1:
        return Alone()
    if config.communicator == "mpi":
        world = MpiCommunicator()
        if world.shard.count != config.shards:
            raise ConfigError(
                f"{config.shards} shards need as many processes; there are {world.shard.count}: start them with "
                f"mpirun -n {config.shards} python -m slora_ref ..."
            )
        return world
    if config.communicator == "nccl":
        return start_processes(config.shards, "slora_ref.engine.worker")
    own, *others = thread_communicators(config.shards)
    for other in others:
        name = f"shard-{other.shard.index}"
        threading.Thread(target=_follow_quietly, args=(other,), name=name, daemon=True).start()
    return own


def _follow_quietly(communicator: Communicator) -> None:
    """Follows; the leader hears of a failure in its own words."""
    with contextlib.suppress(BaseException):
        follow(communicator)

