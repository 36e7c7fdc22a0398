"""Renders the chapters: NN_title.py, run cell by cell, becomes NN_title.md with its outputs and pictures.

    python tutorials/render.py [--check] [chapter.py ...]      (all chapters if none is named; `make tutorials`)

A cell begins with `# %%`. `[markdown]` cells are text in comments. What a code cell prints, and the value of its last
expression, are shown below it. A word after `# %%` says what is shown: `listing` the output and the imports alone,
`picture` and `behind` the output with the code folded, `mistake` and `solution` all of it folded. Every cell is run, in
order.
--check writes nothing; it fails where a page differs from the committed one: text, integers, other numbers in their
first 3 digits, data behind pictures.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
INDEX, BEGIN, END = FOLDER / "README.md", "<!-- begin chapters -->\n", "<!-- end chapters -->"
CODE_FOLDED = {"picture": "The code of the picture", "behind": "The code behind this"}
FOLDED = {"mistake": "Mistakes, and what the check says of them", "solution": "A solution"}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass
class Page:
    """A rendered chapter: its Markdown, and its pictures by file name."""

    text: str = ""
    pictures: dict[str, str] = field(default_factory=dict)


def chapters() -> list[Path]:
    """The chapters in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def about(path: Path) -> dict[str, str]:
    """What the docstring of a chapter says of it: the title, and `Name: value` lines."""
    title, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
    facts = (re.match(r"(\w+): (.*)", line) for line in re.sub(r"\n +", " ", rest).splitlines())
    return {"Title": title} | {fact[1]: fact[2] for fact in facts if fact}


def render(path: Path) -> Page:
    """Runs a chapter."""
    page, facts, number = Page(), about(path), int(path.name[:2])
    page.text = f"# {number}. {facts['Title']}\n\n*{facts['Minutes']} minutes · paper section {facts['Paper']} · "
    page.text += f"[all chapters](README.md) · [{path.name}]({path.name}), from which this page is made*\n\n"
    page.text += f"After it you can {facts['After']}\n\n"
    parts = re.split(r"^# %%(.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    line = parts[0].count("\n")
    for kind, code in zip(map(str.strip, parts[1::2]), parts[2::2], strict=True):
        line += 1
        if kind == "[markdown]":
            page.text += re.sub(r"^# ?", "", code.strip(), flags=re.MULTILINE) + "\n\n"
        else:
            page.text += shown(kind, code.strip(), run("\n" * line + code, path, namespace, page))
        line += code.count("\n")
    page.text += neighbours(path) + "\n"
    return page


def run(code: str, path: Path, namespace: dict[str, Any], page: Page) -> str:
    """Runs one cell as an interactive interpreter would; returns its output as Markdown."""
    tree, value, printed = ast.parse(code, str(path)), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
    output = f"```text\n{printed.getvalue().rstrip()}\n```\n\n" if printed.getvalue().strip() else ""
    if hasattr(value, "svg"):
        page.pictures[f"{value.name}.svg"] = value.svg()
    if hasattr(value, "_repr_markdown_"):
        return output + value._repr_markdown_() + "\n\n"
    return output if value is None else f"{output}```text\n{value!r}\n```\n\n"


def shown(kind: str, code: str, output: str) -> str:
    """A cell on the page."""
    block = f"```python\n{code}\n```\n\n"
    if kind == "listing":
        imports = [line for line in code.splitlines() if line.startswith(("from ", "import "))]
        return "\n".join(["```python", *imports, "```", "", ""] if imports else []) + output
    if kind in CODE_FOLDED:
        return f"{output}<details><summary>{CODE_FOLDED[kind]}</summary>\n\n{block}</details>\n\n"
    if kind in FOLDED:
        return f"<details><summary>{FOLDED[kind]}</summary>\n\n{block}{output}</details>\n\n"
    if kind:
        known = ", ".join(["[markdown]", "listing", *CODE_FOLDED, *FOLDED])
        raise ValueError(f"# %% {kind}: only {known} are known")
    return block + output


def neighbours(path: Path) -> str:
    """The line at the foot of a page."""
    order, links = chapters(), []
    for word, index in (("Before", order.index(path) - 1), ("Next", order.index(path) + 1)):
        if 0 <= index < len(order):
            links.append(f"{word}: [{about(order[index])['Title']}]({order[index].stem}.md)")
    return " · ".join(links)


def index() -> str:
    """The table of chapters in README.md."""
    rows = ["| | chapter | minutes | after it you can | paper |", "| ---: | --- | ---: | --- | --- |"]
    for path in chapters():
        facts = about(path)
        link = f"[{facts['Title']}]({path.stem}.md)"
        rows.append(f"| {int(path.name[:2])} | {link} | {facts['Minutes']} | {facts['After']} | {facts['Paper']} |")
    text = INDEX.read_text(encoding="utf-8")
    return text[: text.index(BEGIN)] + BEGIN + "\n".join(rows) + "\n" + text[text.index(END) :]


def differences(old: str, new: str) -> list[str]:
    """The lines in which a page is stale."""
    before, after = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (old, new))
    found = [f"- {a}\n+ {b}" for a, b in zip(before, after, strict=False) if not same(a, b)]
    return found + [f"{len(before)} lines, now {len(after)}"] * (len(before) != len(after))


def same(old: str, new: str) -> bool:
    """Whether two lines say the same: words and integers exactly, other numbers in their first 3 digits."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(a == b or (set(".e") & set(a + b) and close(a, b)) for a, b in pairs)


def close(old: str, new: str) -> bool:
    """Whether two printed numbers agree to 3 digits."""
    a, b = (float(number.replace(",", "")) for number in (old, new))
    return abs(a - b) <= 1e-3 * max(a, b)


def digest(svg: str) -> list[str]:
    """What a picture says of the data it was drawn from."""
    return re.findall(r"sha256:[0-9a-f]{64}", svg)


def stale(path: Path, page: Page) -> list[str]:
    """What is wrong with the committed page and pictures of a chapter."""
    markdown = path.with_suffix(".md")
    found = differences(markdown.read_text(encoding="utf-8") if markdown.exists() else "", page.text)
    for name, svg in page.pictures.items():
        file = FOLDER / "figures" / name
        if not file.exists() or digest(file.read_text(encoding="utf-8")) != digest(svg):
            found.append(f"figures/{name} shows other data")
    return found


def in_the_chapter(error: Exception) -> str:
    """What a cell failed with, and where; how it came to be run here is left out."""
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return "".join([*traceback.format_list(where), *traceback.format_exception_only(error)])


def main(arguments: list[str]) -> int:
    """Writes or checks pages; 1 if one is stale, or a cell fails."""
    check, failed = "--check" in arguments, False
    for path in [Path(name).resolve() for name in arguments if name != "--check"] or chapters():
        try:
            page = render(path)
        except Exception as error:  # noqa: BLE001  whatever a cell raises is the reader's to see
            print(f"{path.name}: a cell failed, no page is written\n{in_the_chapter(error)}")
            failed = True
            continue
        if check:
            faults = stale(path, page)
            failed |= bool(faults)
            print(f"{path.name}: " + ("up to date" if not faults else "stale; make tutorials\n" + "\n".join(faults)))
            continue
        path.with_suffix(".md").write_text(page.text, encoding="utf-8")
        for name, svg in page.pictures.items():
            (FOLDER / "figures" / name).write_text(svg, encoding="utf-8")
        print(f"{path.name}: {len(page.pictures)} pictures, {len(page.text.splitlines())} lines")
    if not check:
        INDEX.write_text(index(), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
