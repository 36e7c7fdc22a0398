"""fuse: two launches of a tape by one, where there is a kernel that does the work of both. For speed alone.

A kernel behind a product takes 2 us before it has read a byte, and LoRA has four of them in a layer. But what makes x
can multiply it with A, and what reads y can add t B first:

    norm -> product -> shrink -> expand -> rope            norm, shrink -> product -> expand, rope
    attention -> product -> shrink -> expand -> norm       attention, shrink -> product -> expand, norm

So a decode step whose rows are alone with their adapters (MBGMV) has no LoRA kernels of its own: half of their time was
waiting. The model and the operations know nothing of it; a tape is rewritten when a graph is made of it, and what its
launches leave in between, y with t B in it and t itself, is read by nobody else. It knows launches, and no backend.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops import fused_arguments
from slora_ref.ops.kernel_backend import KernelBackend, behind
from slora_ref.ops.ladder import fastest_or_none, make_launch, operation_of
from slora_ref.ops.launch import Arguments, Launch, same
from slora_ref.ops.tape import Piece, Tape


def fuse(tape: Tape, backend: KernelBackend) -> Tape:
    """A tape that leaves the same results; sums over d_in may be in another order.

    Args:
        tape: of `backend`, of one step.
    """
    if backend.rungs:  # somebody wants other kernels
        return tape
    left, fused = list(tape.work), Fused(backend)
    while left:
        taken = fused.shrink_in_front(left) or fused.expand_behind(left) or fused.keep(left)
        del left[:taken]
    return Tape(fused.work, tape.notes)


class Fused:
    """The pieces of a tape that are done, from the first on.

    Args:
        backend: prepares launches.
    """

    def __init__(self, backend: KernelBackend) -> None:
        self._backend, self.work = backend, list[Piece]()

    def keep(self, left: list[Piece]) -> int:
        """Takes the next piece as it is."""
        self.work.append(left[0])
        return 1

    def shrink_in_front(self, left: list[Piece]) -> int:
        """Takes x's maker, the product, and the shrink, if they are what comes next; returns how many pieces."""
        if len(left) < 4 or left[1].part != "gemm" or _operation(left[2]) != "mbgmv_shrink":
            return 0
        (maker, product, shrink, behind), name = left[:4], _operation(left[0])
        assert shrink.launch is not None
        if maker.launch is None or "out" not in maker.launch.arguments:
            return 0
        first, second = maker.launch.arguments, shrink.launch.arguments
        if not same(first["out"], second["x"]):
            return 0
        if name == "rms_norm":
            made = self._launch("rms_norm_shrink", fused_arguments.rms_norm_shrink(first, second), maker)
        elif name == "paged_attention_decode" and _operation(behind) == "mbgmv_expand":
            t = self._backend.empty("t_of_heads", (maker.launch.grid[0], *second["t"].shape[1:]), np.float32)
            both = fused_arguments.paged_attention_decode_shrink(first, second, t)
            made = self._launch("paged_attention_decode_shrink", both, maker)
            if made is not None:
                left[3] = self._with_t(behind, t)
        else:
            return 0
        if made is None:
            return 0
        self.work += [made, product]
        return 3

    def expand_behind(self, left: list[Piece]) -> int:
        """Takes the expand and y's reader, if they are what comes next; returns how many pieces."""
        if len(left) < 2 or _operation(left[0]) != "mbgmv_expand":
            return 0
        (expand, reader), name = left[:2], _operation(left[1])
        if name not in ("rope_store", "rms_norm"):
            return 0
        assert expand.launch is not None and reader.launch is not None
        second, first = expand.launch.arguments, reader.launch.arguments
        y = first["qkv"] if name == "rope_store" else first["delta"]
        if y is None or not same(y, second["y"]):
            return 0
        make = fused_arguments.rope_store_expand if name == "rope_store" else fused_arguments.rms_norm_expand
        made = self._launch(f"{name}_expand", make(first, second), reader)
        if made is None:
            return 0
        self.work.append(made)
        return 2

    def _launch(self, operation: str, arguments: Arguments, instead: Piece) -> Piece | None:
        """The launch of a kernel that does the work of two; None: there is none for these sizes."""
        assert instead.launch is not None
        kernel = fastest_or_none(operation, instead.launch.dtype, arguments)
        if kernel is None:
            return None
        return self._prepared(make_launch(kernel, instead.launch.dtype, arguments), instead)

    def _with_t(self, expand: Piece, t: object) -> Piece:
        """An expand that adds other splits than it was made for."""
        assert expand.launch is not None
        arguments = expand.launch.arguments | {"t": t, "splits": np.int32(len(t))}  # type: ignore[arg-type]
        return self._prepared(make_launch(expand.launch.kernel, expand.launch.dtype, arguments), expand)

    def _prepared(self, launch: Launch, instead: Piece) -> Piece:
        before = self.work[-1] if self.work else instead
        launch = behind(_operation(before) or before.part, launch)
        return Piece(instead.part, self._backend.prepare(launch), launch)


def _operation(piece: Piece) -> str:
    return "" if piece.launch is None else operation_of(piece.launch.kernel)
