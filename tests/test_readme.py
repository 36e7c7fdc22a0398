"""README.md stays true: its generated parts, its paths, its table of modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme

from slora_ref.cli.main import parser

ROOT = Path(__file__).parents[1]
TEXT = readme.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", readme.PARTS)
def test_a_generated_part_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python tests/readme.py` makes it so. The picture too: it names the digest of the numbers that are drawn."""
    committed = readme.picture_digest()
    monkeypatch.setattr(readme, "PICTURE", tmp_path / "pool.svg")
    fresh = readme.filled(TEXT, name, readme.PARTS[name]())
    assert readme.masked(fresh) == readme.masked(TEXT)
    if name == "demo":  # its bytes may differ from one matplotlib to the next, the numbers may not
        assert readme.picture_digest() == committed


def test_a_stale_number_is_seen() -> None:
    assert readme.masked("took 1.5 s (200 ms)") == readme.masked("took 9 s (1 ms)")
    assert readme.masked("12 of 256 right") != readme.masked("13 of 256 right")


def test_peft_has_a_column_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the engine's rows of the same run, of which none is lost or taken for PEFT's."""
    results = {name: readme.measured(name) for name in ("DECODE-H200", "SERVE-H200", "SERVE-RANKS-H200", "VLLM-H200")}
    monkeypatch.setattr(readme, "measured", results.__getitem__)
    peer = results["VLLM-H200"]

    def tables() -> tuple[list[str], list[str]]:
        return readme.decode_lines(results["DECODE-H200"], peer), readme.serve_lines(peer, "SERVE-H200")

    for name in results.keys() - {"VLLM-H200"}:
        results[name] = {**results[name], "rows": readme.own_rows(results[name])}
    without = tables()
    theirs = {"system": "peft", "versions": {"peft": "9.8.7"}, "mode": "eager"}
    results["DECODE-H200"]["rows"].append({**theirs, "batch": 64, "adapters": 64, "step_ms": 174.25})
    results["SERVE-H200"]["rows"].append({**theirs, "registered": 2000, "ranks": [8], "requests_per_s": 1.64})
    expected = (("64 adapters", "174.2"), ("2,000 adapters", "1.6"))
    for before, after, (who, number) in zip(without, tables(), expected, strict=True):
        assert len(before) == len(after) and "PEFT 9.8.7" in after[0] and "PEFT" not in "".join(before)
        [row] = [line for line in after if f"| {number} |" in line]
        assert who in row and row.replace(f" {number} |", "", 1) in before
        assert {line.count("|") for line in after if line.startswith("|")} == {before[0].count("|") + 1}


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
    for needed in ("pool.svg", "make demo", "answers checked", "make test", "| paper |", "requests/s", "ms with"):
        assert needed in first


def test_the_example_shows_adapters_at_work() -> None:
    """The README's Python block runs as it stands, and each adapter's answer is its own."""
    assert "upper GARDEN\nmirror " in readme.example_output()
    assert "None garden" in readme.example_output()


def test_the_commands_are_those_there_are() -> None:
    commands = re.findall(r"^\.venv/bin/slora-ref (.*?)(?: +#.*)?$", TEXT, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        parser().parse_args(command.split())
    typed = re.sub(r"^\(`.*`.*\)$", "", TEXT, flags=re.MULTILINE)  # without what was typed where it was measured
    assert not re.search(r"(?<!bin/)slora-ref (?!bench)\w", typed)  # it is on no one's PATH
