"""Options of tensor parallelism, and which of the processes that mpirun started runs the command."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slora_ref.config.engine import COMMUNICATORS
from slora_ref.engine.follower import follow
from slora_ref.engine.leader import stop
from slora_ref.errors import ConfigError
from slora_ref.tp.mpi import MpiCommunicator


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    """Adds --shards and --communicator."""
    parser.add_argument("--shards", type=int, help="tensor-parallel workers (default: 1; of mpirun, all its processes)")
    parser.add_argument(
        "--communicator",
        choices=COMMUNICATORS,
        default="auto",
        help="what the shards are: threads of this process (default on the CPU); processes with a GPU each that it "
        "starts (nccl, default on GPUs); or the processes of `mpirun -n N python -m slora_ref ... --communicator mpi`",
    )


def run_sharded(args: argparse.Namespace, command: Callable[[argparse.Namespace], int]) -> int:
    """Runs the command in this process, or, if mpirun started it as another shard than the first, follows that one.

    Raises:
        ConfigError: a communicator was chosen, and there is nothing to communicate with.
    """
    if args.communicator != "mpi":
        if args.shards is None and args.communicator != "auto":
            raise ConfigError(f"--communicator {args.communicator} connects shards, and there is one: add --shards N")
        args.shards = 1 if args.shards is None else args.shards
        return command(args)
    world = MpiCommunicator()
    if args.shards is None and world.shard.count == 1:
        raise ConfigError("--communicator mpi, and this is the only process: start it with mpirun -n N")
    args.shards = world.shard.count if args.shards is None else args.shards
    if world.shard.index > 0:
        follow(world)
        return 0
    try:
        return command(args)
    finally:
        if world.shard.count > 1:
            stop(world)
