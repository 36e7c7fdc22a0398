"""Arguments by layout: what a kernel's arguments are but for addresses, checked and worked out once. For speed alone.

A step of a large model prepares hundreds of launches, of which most differ from those of another layer in nothing but
where their arrays lie. So whatever follows from shapes, strides and dtypes alone is kept here, by those; addresses
never are, nor the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import numpy as np

from slora_ref.ops.launch import Arguments, Sizes, is_array, sizes_of

Given = ParamSpec("Given")
MOST_LAYOUTS = 4096  # of a function that are remembered: all of a model's buckets many times over
PLAIN = (int, float, tuple, type(None), np.generic)  # what may be given beside arrays; it counts by its value


@dataclass(frozen=True, eq=False)
class Layout:
    """What arguments have in common that differ in addresses alone.

    Args:
        rest: the arguments; None in the place of each array.
        arrays: the names of the arrays, and which of the values given they are.
        sizes: see sizes_of.
    """

    rest: Arguments
    arrays: tuple[tuple[str, int], ...]
    sizes: Sizes

    @classmethod
    def of(cls, arguments: Arguments, names: Sequence[str], values: Sequence[Any]) -> Layout:
        """The layout of arguments that were made from these values."""
        arrays = [name for name, value in arguments.items() if is_array(value)]
        places = tuple((name, names.index(name)) for name in arrays)
        assert all(arguments[name] is values[place] for name, place in places), f"other arrays than given: {arrays}"
        return cls(arguments | dict.fromkeys(arrays), places, sizes_of(arguments))

    def with_arrays(self, values: Sequence[Any]) -> LaidOut:
        """Arguments of this layout."""
        arguments = LaidOut(self.rest)
        arguments.layout = self
        for name, place in self.arrays:
            arguments[name] = values[place]
        return arguments


class LaidOut(Arguments):
    """Arguments, and their layout: the same object for all that differ in addresses alone."""

    __slots__ = ("layout",)
    layout: Layout


def by_layout(make: Callable[Given, Arguments]) -> Callable[Given, Arguments]:
    """Makes arguments once for each layout of the arrays given, and from then on only puts the arrays in their places.

    Args:
        make: checks arrays, and names each as its own parameter; whatever else it returns follows from their layouts
            and from the plain values given. What it refuses is not kept.
    """
    known: dict[tuple[Hashable, ...], Layout] = {}
    names = tuple(signature(make).parameters)

    @wraps(make)
    def arguments(*values: Given.args, **named: Given.kwargs) -> Arguments:
        if named:
            return make(*values, **named)
        key = _key(values)
        layout = known.get(key)
        if layout is None:
            if len(known) == MOST_LAYOUTS:
                known.clear()
            layout = known[key] = Layout.of(make(*values, **named), names, values)
        return layout.with_arrays(values)

    return arguments


def _key(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """What arguments made from these values depend on, but for addresses."""
    return tuple([v if isinstance(v, PLAIN) else (v.shape, v.strides, v.dtype) for v in values])
