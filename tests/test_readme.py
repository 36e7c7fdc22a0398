"""README.md stays true: its generated parts, its paths, its table of modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme

ROOT = Path(__file__).parents[1]
TEXT = readme.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", readme.PARTS)
def test_a_generated_part_is_up_to_date(name: str) -> None:
    """`python tests/readme.py` makes it so."""
    before = readme.PICTURE.read_bytes()
    fresh = readme.filled(TEXT, name, readme.PARTS[name]())
    readme.PICTURE.write_bytes(before)  # its bytes may differ from one matplotlib to the next
    assert readme.masked(fresh) == readme.masked(TEXT)


def test_a_stale_number_is_seen() -> None:
    assert readme.masked("took 1.5 s (200 ms)") == readme.masked("took 9 s (1 ms)")
    assert readme.masked("12 of 256 right") != readme.masked("13 of 256 right")


def test_every_path_and_link_exists() -> None:
    paths = set(re.findall(r"`((?:slora_ref|tests|tutorials|kernels_cu)/[\w./-]*)`", TEXT))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link}
    assert len(paths) > 10
    assert not {path for path in paths | links if not (ROOT / path).exists()}


def test_the_table_names_every_module() -> None:
    tops = {path.stem if path.is_file() else path.name for path in (ROOT / "slora_ref").iterdir()}
    modules = {top for top in tops if not top.startswith("__")}
    named = set(re.findall(r"`slora_ref/(\w+)", TEXT))
    assert modules - named == set()


def test_the_first_screen_has_what_a_visitor_needs() -> None:
    first = "\n".join(TEXT.splitlines()[:60])
    for needed in ("pool.svg", "make demo", "answers checked", "make test"):
        assert needed in first
