"""kernels_cu/README.md says what is so: its ladder is generated, and its gdb session happens as printed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_readme import README, ROOT, filled


def part(name: str) -> str:
    """The lines of a fenced part of the README."""
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"<!-- begin {name} -->\n```\w*\n(.*?)```\n<!-- end {name} -->", text, re.DOTALL)
    assert found
    return found[1]


def test_the_ladder_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert filled(text) == text, "run python tests/kernel_readme.py"


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_the_session_in_gdb_happens_as_printed(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(part("step"), encoding="utf-8")
    session = part("gdb").splitlines()[1:]
    commands = [line.removeprefix("(gdb) ") for line in session if line.startswith("(gdb)")]
    options = [word for command in ("set breakpoint pending on", *commands) for word in ("-ex", command)]
    done = subprocess.run(
        ["gdb", "-q", "-nx", "-batch", *options, "--args", sys.executable, str(tmp_path / "step.py")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    printed = [line for line in done.stdout.splitlines() if re.match(r"\d+\t|\$\d", line)]
    assert printed == [line for line in session if not line.startswith("(gdb)")], done.stdout + done.stderr
