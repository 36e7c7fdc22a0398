"""The chapters stay true: each is run again and compared with its page, and no link leads nowhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import render
import show
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tutorials"
CHAPTERS = render.chapters()
PAGES = [FOLDER / "README.md", *(path.with_suffix(".md") for path in CHAPTERS)]


@pytest.mark.parametrize("chapter", [path.name for path in CHAPTERS])
def test_a_page_is_up_to_date(chapter: str) -> None:
    """In a process of its own: without the shape checks of the test run, and as a reader runs it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(FOLDER / "render.py"), "--check", str(FOLDER / chapter)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_chapters_is_up_to_date() -> None:
    assert render.INDEX.read_text(encoding="utf-8") == render.index()


def test_each_chapter_has_a_picture_facts_and_an_exercise_whose_check_tells_a_mistake_from_a_solution() -> None:
    assert len(CHAPTERS) > 0
    for path in CHAPTERS:
        source, page = path.read_text(encoding="utf-8"), path.with_suffix(".md").read_text(encoding="utf-8")
        assert render.about(path).keys() >= {"Title", "Minutes", "Paper", "After"}, path
        assert "](figures/" in page and "# %% solution" in source, path
        assert ": not written yet" in page and ": refused, " in page and ": passed" in page, path


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Links to files or headings that are not there; code and outputs hold none."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, heading = link.partition("#")
        file = page.parent / target if target else page
        if "://" not in link and not (file.exists() and (not heading or heading in anchors(file.read_text("utf-8")))):
            dead.append(link)
    return dead


def dead_paths(text: str) -> set[str]:
    """Files and folders that are named and not there; the package's and the tutorials' by short names too."""
    named = set(re.findall(r"`((?:slora_ref|tests|tutorials|kernels_cu)/[\w./-]*|[\w/]+(?:\.py|/))`", text))
    return {path for path in named if not any((at / path).exists() for at in (ROOT, ROOT / "slora_ref", FOLDER))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not dead_links(page, text)
    assert not dead_paths(text)


def test_a_dead_link_is_seen() -> None:
    text = "[a](none.md) [b](README.md#nowhere) [c](README.md) `slora_ref/no.py` `store/` `no/`\n```\n[d](none)\n```\n"
    assert dead_links(FOLDER / "README.md", text) == ["none.md", "README.md#nowhere"]
    assert dead_paths(text) == {"slora_ref/no.py", "no/"}


def test_every_picture_belongs_to_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"figures/([\w]+\.svg)", page.read_text(encoding="utf-8"))}
    assert {path.name for path in (FOLDER / "figures").iterdir()} - {"pool.svg"} == shown  # pool.svg is README.md's


CHAPTER = '''"""A title

Minutes: 1
Paper: 5.1
After: count.
"""

# %% [markdown]
# ## Text

# %%
import show

print("value", {value})

# %% picture
from matplotlib.figure import Figure

figure = Figure()
figure.subplots().plot([0, 1], [0, {drawn}])
show.Picture(figure, "probe", "a line")

# %% solution
1 + 1
'''


def small_page(folder: Path, value: object = 3, drawn: float = 1.0) -> tuple[Path, render.Page]:
    path = folder / "00_probe.py"
    path.write_text(CHAPTER.format(value=value, drawn=drawn), encoding="utf-8")
    return path, render.render(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tutorials with one chapter, rendered."""
    monkeypatch.setattr(render, "FOLDER", tmp_path)
    monkeypatch.setattr(render, "INDEX", tmp_path / "README.md")
    render.INDEX.write_text(render.BEGIN + render.END, encoding="utf-8")
    (tmp_path / "figures").mkdir()
    path, page = small_page(tmp_path)
    path.with_suffix(".md").write_text(page.text, encoding="utf-8")
    (tmp_path / "figures" / "probe.svg").write_text(page.pictures["probe.svg"], encoding="utf-8")
    return tmp_path


def test_a_page_has_text_code_output_picture_and_a_folded_solution(folder: Path) -> None:
    path, page = small_page(folder)
    assert not render.stale(path, page)
    for part in ("# 0. A title", "\n## Text\n", "```text\nvalue 3\n```", "![a line](figures/probe.svg)"):
        assert part in page.text
    assert "<summary>A solution</summary>\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n</details>" in page.text


@pytest.mark.parametrize("changed", [{"value": 4}, {"value": "'word'"}, {"drawn": 1.01}])
def test_a_changed_value_or_drawing_makes_a_page_stale(folder: Path, changed: dict[str, object]) -> None:
    assert render.stale(*small_page(folder, **changed))


def test_a_cell_that_fails_is_told_in_its_own_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = folder / "00_probe.py", folder / "00_probe.md"
    before = page.read_text(encoding="utf-8")
    path.write_text(CHAPTER.format(value=3, drawn=1.0) + '\nassert False, "too few pages"\n', encoding="utf-8")
    assert render.main([str(path)]) == 1
    told = capsys.readouterr().out
    assert told.endswith("AssertionError: too few pages\n\n") and "00_probe.py" in told and "render.py" not in told
    assert page.read_text(encoding="utf-8") == before


def test_numbers_are_compared_in_their_first_three_digits_and_integers_exactly() -> None:
    for old, new in (("a 1.2345", "a 1.2349"), ("1,000.5 ms", "1,000.9 ms"), ("3e-07", "3.0e-07"), ("a  b", "a  b")):
        assert render.same(old, new)
    for old, new in (("1.23", "1.24"), ("4096", "4097"), ("1,000 ms", "1,001 ms"), ("1 s", "1 h"), ("0.0", "0.1")):
        assert not render.same(old, new)
    assert render.differences("a\n\nb  1", "a\nb 1") == []
    assert render.differences("a\nb", "a") != []


def test_a_cell_of_a_kind_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="# %% figure"):
        render.shown("figure", "", "")


def test_the_digest_of_a_picture_follows_what_is_drawn_and_not_how() -> None:
    def digest(height: float, colour: str = "black", word: str = "x") -> str:
        figure = Figure()
        axes = figure.subplots()
        axes.bar([0], [height], color=colour)
        axes.set_xlabel(word)
        return show.Picture(figure, "p", "").digest()

    assert digest(1.0) == digest(1.0001) == digest(1.0, "grey")
    assert len({digest(1.0), digest(1.1), digest(1.0, word="y")}) == 3


def test_an_attempt_tells_unwritten_from_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def check(candidate: Callable[[], int]) -> None:
        assert candidate() == 1

    def unwritten() -> int:
        raise NotImplementedError

    show.attempt(check, unwritten)
    assert capsys.readouterr().out == "unwritten: not written yet\n"
    with pytest.raises(AssertionError):
        show.attempt(check, lambda: 2)


def test_a_time_limit_interrupts_what_takes_longer_and_nothing_else() -> None:
    with pytest.raises(TimeoutError, match="not done after"), show.time_limit(0.05):
        while True:
            pass
    with show.time_limit(60):
        done = True
    assert done and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_check_that_accepts_a_mistake_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def check(candidate: Callable[[], int]) -> None:
        if candidate() != 1:
            raise AssertionError("not 1")

    def wrong() -> int:
        return 2

    show.refused(check, wrong)
    assert capsys.readouterr().out == "wrong: refused, not 1\n"
    with pytest.raises(AssertionError, match="accepts"):
        show.refused(check, lambda: 1)
