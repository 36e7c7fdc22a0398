"""The command line in a real shell: a stdout that is ASCII, full or closed, and the exit status that the shell sees."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import outcome

ROOT = Path(__file__).parents[1]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `command`, in which SLORA stands for the program, in bash."""
    program = f"{shlex.quote(sys.executable)} -m slora_ref"
    return subprocess.run(
        ["bash", "-c", command.replace("SLORA", program)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
    )


def test_an_ascii_terminal_gets_plain_marks() -> None:
    done = shell("SLORA demo --adapters 40 --requests 3", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"# keys and values   = adapter weights   . free" in done.stdout
    assert b"#===." in done.stdout


def test_a_closed_stdout_is_no_traceback() -> None:
    done = shell("SLORA generate --model toy --prompt abc= >&-")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("command", ["generate --model toy --prompt abc=", "generate --help", "inspect toy --json"])
def test_a_full_disk_is_one_line(command: str) -> None:
    done = shell(f"SLORA {command} > /dev/full")
    assert done.returncode == 2
    assert b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("command", "progress"),
    [
        ("demo --adapters 40 --requests 5", ["done 5/5", "checked 1/5 answers", "checked 5/5 answers"]),
        ("demo --adapters 40 --requests 5 --json", ["done 5/5", "checked 5/5 answers"]),
        ("bench host", ["measuring ...", "2 measured"]),
    ],
)
def test_a_terminal_sees_that_work_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, progress: list[str]
) -> None:
    """And the line that says so is gone at the end."""
    monkeypatch.setattr("slora_ref.cli.bench._host", lambda _: lambda say: [say("one"), say("two")])
    stream = sys.stderr if "--json" in command else sys.stdout
    monkeypatch.setattr(stream, "isatty", lambda: True)
    code, *texts = outcome(capsys, command)
    text = texts["--json" in command]
    assert code == 0
    for words in progress:
        assert words in text
    assert not text.rpartition("\x1b[K")[2].startswith(("checked", "2 measured"))


def test_a_picture_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = outcome(capsys, f"demo --plot {tmp_path / 'a.svg'}")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be written" in err


def test_a_closed_pipe_is_no_traceback() -> None:
    done = shell("SLORA generate --model toy --prompt abc= | head -c 0; echo ${PIPESTATUS[0]}")
    assert done.stdout == b"141\n"
    assert done.stderr == b""
