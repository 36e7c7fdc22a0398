"""Shards as processes that shard 0 starts on its host; each has a socket to it, for orders and for small arrays.

On GPUs, NCCL (nccl.py) or kernels (ops/cuda_peers.py) move the arrays of steps and this carries the rest. A process
that ends too early ends the group: shard 0 waits for each on a thread, and a follower looks whether its parent is still
there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from slora_ref.errors import ShardLost
from slora_ref.shapes import Array, Shaped
from slora_ref.tp.communicator import Communicator
from slora_ref.tp.shard import Shard

LOOK_S = 0.5  # between two looks for the parent
GRACE_S = 5.0  # that a process has to leave by itself


class ProcessCommunicator(Communicator):
    """A shard that is a process of this host. Shard 0 has a link to each other, the others one to it.

    Args:
        shard: which one.
        links: to shards 1, 2, ..., or to shard 0.
    """

    def __init__(self, shard: Shard, links: list[Connection]) -> None:
        super().__init__(shard)
        self._links, self._reason = links, ""
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def leads(self) -> bool:
        """Whether this is shard 0."""
        return self.shard.index == 0

    def _broadcast(self, message: bytes | None) -> tuple[bytes, int]:
        if message is None:
            return self._hear(self._links[0]), 0
        for link in self._links:
            self._say(link, message)
        return message, len(message) * len(self._links)

    def gather(self, x: Shaped[Array, " *dims"], gathered: Shaped[Array, "shards ..."]) -> int:
        if self.leads:
            gathered[0] = x
            for index, link in enumerate(self._links, start=1):
                gathered[index] = np.frombuffer(self._hear(link), x.dtype).reshape(x.shape)
            return self._broadcast(gathered.tobytes())[1]
        self._say(self._links[0], x.tobytes())
        gathered[...] = np.frombuffer(self._hear(self._links[0]), x.dtype).reshape(gathered.shape)
        return int(x.nbytes)

    def reduce(self, x: Shaped[Array, " ..."]) -> int:
        gathered = np.empty((self.shard.count, *x.shape), x.dtype)
        sent = self.gather(x, gathered)
        x[...] = gathered.sum(axis=0)
        return sent

    def _say(self, link: Connection, message: bytes) -> None:
        self.check()
        try:
            link.send_bytes(message)
        except OSError:
            self._end_of_link()

    def _hear(self, link: Connection) -> bytes:
        self.check()
        try:
            return link.recv_bytes()
        except (EOFError, OSError):
            return self._end_of_link()

    def _end_of_link(self) -> bytes:
        try:
            self.fail("a shard has closed its link: it has died, or has failed and said so on stderr")
        except Exception as error:
            raise ShardLost(self._reason) from error
        raise ShardLost(self._reason)

    def check(self) -> None:
        """Raises ShardLost if the group has ended."""
        if self._reason:
            raise ShardLost(self._reason)

    def fail(self, reason: str) -> None:
        """Ends the group: wakes who waits for a message or for a GPU, and ends the processes that shard 0 started.

        All of that is done even if some of it fails; then it raises what failed last.
        """
        if self._reason:
            return
        self._reason = reason
        with contextlib.ExitStack() as left:  # from the last to the first
            for process in self._processes:
                left.callback(process.terminate)
            for link in self._links:
                left.callback(_shut, link)
            for wake in reversed(self.on_loss):
                left.callback(wake)

    # --- processes ---

    def watch(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """From here on the end of one of these processes is the end of the group."""
        self._processes = processes
        for index, process in enumerate(processes, start=1):
            threading.Thread(target=self._wait_for, args=(index, process), daemon=True).start()

    def _wait_for(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code != 0:  # it leaves with 0 when it has been told to stop
            self.fail(f"shard {index} has ended with exit code {code}")

    def close(self) -> None:
        """The processes have been told to stop, or are of no use any more: waits for them, then ends them."""
        for process in self._processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _shut(link: Connection) -> None:
    """Ends a link, which may be closed, for those who wait at it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def start_processes(shards: int, module: str) -> ProcessCommunicator:
    """Starts `python -m module FD INDEX SHARDS` for each shard but this one; FD is its end of the link."""
    links, processes = [], []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
    for index in range(1, shards):
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", module, str(theirs.fileno()), str(index), str(shards)]
            processes.append(subprocess.Popen(words, env=environment, pass_fds=[theirs.fileno()]))
        links.append(Connection(ours.detach()))
    own = ProcessCommunicator(Shard(0, shards), links)
    own.watch(processes)
    return own


def started_process(words: list[str]) -> ProcessCommunicator:
    """The end of the link in a process that start_processes has started, which ends with its parent."""
    file, index, shards = map(int, words)
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    return ProcessCommunicator(Shard(index, shards), [Connection(file)])


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
