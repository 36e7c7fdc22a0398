"""Regular expressions from a stranger's config, matched against all module names at once, in bounded time.

PEFT reads target_modules, rank_pattern and alpha_pattern as Python regular expressions. Python's matcher backtracks, so
a pattern such as (a|a)*b in a file would hang the server for hours. Here a pattern is followed breadth-first: the state
is the set of places reached so far, an integer with one bit a character, and each element of the pattern maps sets to
sets with a few shifts. All names lie in one text, one a line, so one pass answers for all of them. Only the answer yes
or no is needed, so greedy and lazy repeats are the same. Parsed by Python's own parser; groups that look around or
back are refused.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from slora_ref.config.fields import show
from slora_ref.errors import UnsupportedAdapter

MAX_PATTERN = 4096  # characters
MAX_COST = 400_000  # of all patterns of an adapter together, in steps on 20,000 characters: under half a second
CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdigit,
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdigit(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    op.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class TooHard(ValueError):
    """A pattern that needs more than this matcher does."""


class Names:
    """The module names of a model as lines of one text. A set of places is an int; bit i: the next character is i."""

    def __init__(self, names: Sequence[str]) -> None:
        text = "".join(name + "\n" for name in names)
        places: defaultdict[str, list[int]] = defaultdict(list)
        for i, c in enumerate(text):
            places[c].append(i)
        ends = places.pop("\n", [])
        self.name_at = dict(zip(ends, names, strict=True))
        self.ends = _bits(ends)
        self.starts = _bits([0, *(end + 1 for end in ends[:-1])])
        self.places = {c: _bits(where) for c, where in places.items()}
        self.longest = max(map(len, names))
        self.step_cost = 1 + len(text) // 20_000
        self.cost = 0

    def fullmatch(self, pattern: str) -> set[str]:
        """The names that `re.fullmatch(pattern, name)` accepts. Raises UnsupportedAdapter."""
        if len(pattern) > MAX_PATTERN:
            raise UnsupportedAdapter(f"pattern {show(pattern)} has {len(pattern)} characters; most are {MAX_PATTERN}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern)
            if tree.state.flags != int(re.UNICODE):
                raise TooHard("flags are not supported")
            matched = self._sequence(tree, self.starts) & self.ends
        except (re.error, RecursionError, OverflowError, TooHard) as cause:
            raise UnsupportedAdapter(f"pattern {show(pattern)} cannot be used: {show(str(cause))}") from None
        return {self.name_at[end] for end in _places(matched)}

    def _sequence(self, nodes: Any, at: int) -> int:
        """The places reached from the set `at` by all `nodes` in turn."""
        for kind, value in nodes:
            if not at:
                return 0
            at = self._node(kind, value, at)
        return at

    def _node(self, kind: Any, value: Any, at: int) -> int:
        """The places reached from the set `at` by one element of a pattern."""
        self._spend()
        one = self._characters(kind, value)
        if one is not None:
            return (at & one) << 1
        if kind is op.BRANCH:
            return _union(self._sequence(branch, at) for branch in value[1])
        if kind is op.SUBPATTERN and not value[1] and not value[2]:
            return self._sequence(value[3], at)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(value[2], value[0], value[1], at)
        if kind is op.AT:
            return at & self._anchor(value)
        raise TooHard(f"{str(kind).lower()} is not supported")

    def _characters(self, kind: Any, value: Any) -> int | None:
        """The places of the characters that an element for one character accepts; None for other elements."""
        if kind is op.LITERAL:
            return self.places.get(chr(value), 0)
        if kind is op.NOT_LITERAL:
            return self._where(lambda c: c != chr(value))
        if kind is op.ANY:
            return self._where(lambda c: True)
        return self._where(lambda c: _in_class(value, c)) if kind is op.IN else None

    def _where(self, test: Callable[[str], bool]) -> int:
        """The places of all characters that pass `test`; the ends of lines never do."""
        self._spend(10)
        return _union(bits for c, bits in self.places.items() if test(c))

    def _repeat(self, nodes: Any, least: int, most: int, at: int) -> int:
        """`least` to `most` rounds of `nodes`."""
        one = self._characters(*nodes[0]) if len(nodes) == 1 and most is op.MAXREPEAT and least <= 1 else None
        if one is not None:
            return self._run(one, (at & one) << 1 if least else at)
        for _ in range(least):
            self._spend()
            before, at = at, self._sequence(nodes, at)
            if at in (0, before):
                break
        reached = at
        for _ in range(least, most):
            self._spend()
            at = self._sequence(nodes, at) & ~reached
            reached |= at
            if not at:  # no new place: further rounds reach none either
                break
        return reached

    def _run(self, one: int, at: int) -> int:
        """The places reached by any number of characters from `one`, in log2(line) doublings."""
        into, step = one << 1, 1
        while step <= self.longest:
            at |= into & (at << step)
            into &= into << step
            step *= 2
        return at

    def _anchor(self, kind: Any) -> int:
        """The places where an anchor holds: a name is the whole text, so ^ is its start and $ its end."""
        if kind in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return self.starts
        if kind in (op.AT_END, op.AT_END_STRING):
            return self.ends
        if kind is op.AT_BOUNDARY:
            words = self._where(CATEGORIES[op.CATEGORY_WORD])
            return words ^ (words << 1)
        raise TooHard(f"{str(kind).lower()} is not supported")

    def _spend(self, steps: int = 1) -> None:
        """Count work. Raises TooHard when it is too much."""
        self.cost += steps * self.step_cost
        if self.cost > MAX_COST:
            raise TooHard("too complicated")


def _bits(places: Sequence[int]) -> int:
    """An integer with these bits set."""
    data = bytearray(max(places, default=-1) // 8 + 1)
    for place in places:
        data[place // 8] |= 1 << place % 8
    return int.from_bytes(data, "little")


def _places(bits: int) -> Iterable[int]:
    """The bits that are set, from the lowest."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _union(sets: Iterable[int]) -> int:
    """All places of several sets."""
    reached = 0
    for places in sets:
        reached |= places
    return reached


def _in_class(items: Any, c: str) -> bool:
    """Whether a character is in a class such as [a-z0-9] or [^._]."""
    negated = items[0][0] is op.NEGATE
    return negated != any(_is_item(kind, value, c) for kind, value in items[negated:])


def _is_item(kind: Any, value: Any, c: str) -> bool:
    """Whether a character is one item of a class: a character, a range or a category."""
    if kind is op.LITERAL:
        return ord(c) == int(value)
    if kind is op.RANGE:
        return bool(value[0] <= ord(c) <= value[1])
    return CATEGORIES[value](c)
