"""Mailboxes on GPUs of one host: memory of each shard that the others' kernels write to (kernels_cu/peers.h).

A small array takes one launch and one way over the link that way, where NCCL needs several microseconds more. It knows
no kernels. NVLink multicast is not used.
"""

from __future__ import annotations

import contextlib
import socket

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime

from slora_ref.ops.peer_arguments import BLOCKS, Mailbox, memory_bytes
from slora_ref.shapes import Array
from slora_ref.tp.communicator import Communicator

HANDLE_BYTES, NAME_BYTES = 64, 64
LAZY = 1  # cudaIpcMemLazyEnablePeerAccess, the one flag that there is


def open_mailbox(host: Communicator) -> Mailbox | None:
    """This shard's, on the current GPU; None on all shards if some cannot reach each other's memory, or have no room.

    Args:
        host: carries what lies in host memory. When the group ends, nobody is waited for any more.
    """
    shard, size = host.shard, memory_bytes(host.shard.count)
    memory = _zeros(size)
    cards = host.all_gather(_card(memory))
    own = cards[shard.index]
    addresses = [memory if shard.index == index else _address(card, own) for index, card in enumerate(cards)]
    if host.all_gather(np.array([0 in addresses], np.uint8)).any():
        return None
    stop = cupyx.zeros_pinned((1,), np.int32)
    host.on_loss.insert(0, lambda: stop.fill(1))  # before NCCL is aborted, which may wait for what runs on the GPU
    kept = cupy.cuda.UnownedMemory(memory, size, None)  # until the process ends: others may still write to it
    words = cupy.ndarray(size // 4, np.int32, cupy.cuda.MemoryPointer(kept, 0))
    offsets = np.array(addresses, np.int64) - memory
    return Mailbox(shard, words, cupy.asarray(offsets), cupy.zeros(BLOCKS, np.int32), stop)


def _zeros(size: int) -> int:
    """The address of so many bytes; 0: there is no room."""
    try:
        memory = int(runtime.malloc(size))
    except runtime.CUDARuntimeError:
        return 0
    runtime.memset(memory, 0, size)
    runtime.deviceSynchronize()  # before anybody else writes there
    return memory


def _card(memory: int) -> Array:
    """[bytes] what others open memory by, zeros where the system has no such thing, and the host's name."""
    card = np.zeros(HANDLE_BYTES + NAME_BYTES, np.uint8)
    with contextlib.suppress(runtime.CUDARuntimeError):
        card[:HANDLE_BYTES] = np.frombuffer(bytes(runtime.ipcGetMemHandle(memory)), np.uint8)
    name = socket.gethostname().encode()[:NAME_BYTES]
    card[HANDLE_BYTES : HANDLE_BYTES + len(name)] = np.frombuffer(name, np.uint8)
    return card


def _address(card: Array, own: Array) -> int:
    """Where another shard's memory lies for this one; 0: it cannot be reached."""
    if not card[:HANDLE_BYTES].any() or (card[HANDLE_BYTES:] != own[HANDLE_BYTES:]).any():
        return 0
    try:
        return int(runtime.ipcOpenMemHandle(card[:HANDLE_BYTES].tobytes(), LAZY))
    except runtime.CUDARuntimeError:
        return 0
