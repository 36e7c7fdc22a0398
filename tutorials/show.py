"""What a chapter shows beside its text: source code, tables, pictures, attempts at exercises.

Each returns something that displays itself at the end of a cell, on the rendered page and in Jupyter alike. It knows no
chapter and draws nothing itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import re
import signal
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DARK, MIDDLE, LIGHT, EDGE = "#1b4f72", "#e08a3c", "#d5dde3", "#5d6d7e"  # told apart in grey too


@dataclass(frozen=True)
class Markdown:
    """Text that is shown as it is."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text


def source(*things: Any) -> Markdown:
    """The source of functions, methods or classes, as it stands in the repository now."""
    blocks = []
    for thing in things:
        path = Path(inspect.getsourcefile(thing) or "").resolve().relative_to(ROOT)
        code = textwrap.dedent(inspect.getsource(thing)).rstrip()
        blocks.append(f"`{thing.__qualname__}` in [{path}](../{path}):\n```python\n{code}\n```")
    return Markdown("\n\n".join(blocks))


def excerpt(path: str, begins: str, ends: str = "", language: str = "cpp") -> Markdown:
    """The lines of a file of the repository from the one with `begins` to the one with `ends`, or to its end."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if begins in line)
    last = next((number for number, line in enumerate(lines) if ends and number >= first and ends in line), len(lines))
    return Markdown(f"From [{path}](../{path}):\n```{language}\n" + "\n".join(lines[first : last + 1]) + "\n```")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """A table; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [all(re.fullmatch(r"[-+]?[\d.,]+%?|-", row[column]) for row in cells) for column in range(len(header))]
    rule = ["---:" if right else "---" for right in numeric]
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in [list(header), rule, *cells]))


def measured(name: str) -> dict[str, Any]:
    """A committed result in slora_ref/bench/results; says what was run, on what, and when."""
    result: dict[str, Any] = json.loads((ROOT / f"slora_ref/bench/results/{name}.json").read_text(encoding="utf-8"))
    if "rows" in result:
        result["rows"] = [row for row in result["rows"] if row.get("system") != "peft"]  # the engine's alone
    machine = result["machine"]
    host = f"{machine['cores']} cores of {machine['cpu']}"
    where = f"{machine['gpu']}, CuPy {machine['cupy']}" if machine["gpu"] else host
    print(f"{result['command']}\n    on {where}, {result['date']}")
    return result


def attempt(check: Callable[[Any], None], candidate: Any) -> None:
    """Runs an exercise's check on what the reader wrote; says so if there is nothing yet."""
    try:
        check(candidate)
    except NotImplementedError:
        print(f"{candidate.__name__}: not written yet")
    else:
        print(f"{candidate.__name__}: passed")


def refused(check: Callable[[Any], None], mistake: Any) -> None:
    """Shows what a check says of a plausible mistake; a check that accepts it is a fault of the chapter."""
    try:
        check(mistake)
    except Exception as error:  # noqa: BLE001  whatever it is, it is shown
        print(f"{mistake.__name__}: refused, {error}")
    else:
        raise AssertionError(f"the check accepts {mistake.__name__}")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts what runs within it after so many seconds; a limit is far above what a good solution takes.

    Raises:
        TimeoutError: it was not done.
    """

    def too_late(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure under a name, drawn to the same bytes each time.

    Args:
        name: of the file in tutorials/figures, without .svg.
        caption: for those who do not see it, too.
    """

    figure: Any
    name: str
    caption: str

    def svg(self) -> str:
        """The figure as SVG, with the digest of its data in it."""
        import matplotlib as mpl

        file = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": "slora_ref", "svg.fonttype": "path"}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Identifier": self.digest()})
        return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)

    def digest(self) -> str:
        """SHA-256 of all that is drawn, numbers to 3 digits: the same whatever version drew it."""
        parts = [text.get_text() for text in self.figure.texts]
        for axes in self.figure.axes:
            parts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.texts)]
            for line in axes.lines:
                parts += [str(line.get_label()), _numbers(line.get_xydata())]
            for patch in axes.patches:
                parts.append(_numbers(patch.get_patch_transform().transform(patch.get_path().vertices)))
            for collection in axes.collections:
                parts += [_numbers(path.vertices) for path in collection.get_paths()]
                parts.append(_numbers(collection.get_offsets()))
            parts += [_numbers(image.get_array()) for image in axes.images]
        return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _repr_markdown_(self) -> str:
        return f"![{self.caption}](figures/{self.name}.svg)"

    def _repr_svg_(self) -> str:
        return self.svg()


def _numbers(array: Any) -> str:
    return " ".join(f"{float(number) + 0.0:.3g}" for number in array.ravel())
