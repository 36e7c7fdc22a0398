"""Broken folders of every kind load right or are refused with one line, quickly and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Hypothesis makes a table of all of Unicode, which takes 190 MB, when it finds none in the folder .hypothesis.
MAKE_TABLE = "from hypothesis import strategies; strategies.text().validate()"
SCRIPT = Path(__file__).with_name("fuzz_loading.py")


@pytest.mark.parametrize("examples", [400])
def test_broken_folders_load_right_or_are_refused_with_one_line(examples: int) -> None:
    """A subprocess, as time and memory count; 10,000 examples: python tests/fuzz_loading.py 10000."""
    seen = fuzz(examples)
    assert seen["grown_mb"] < 100, seen  # 27 here
    assert seen["slowest_s"] < 1.0
    assert seen["loaded"] > examples / 20, "the fuzz breaks everything, so it tests little"
    assert seen["refused"] > examples / 4


def fuzz(examples: int) -> dict[str, float]:
    """What one run of the script saw."""
    command = [sys.executable, str(SCRIPT), str(examples)]
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # the memory of BLAS threads is not the loader's
    subprocess.run([sys.executable, "-c", MAKE_TABLE], check=True, env=alone)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen: dict[str, float] = json.loads(done.stdout)
    return seen
