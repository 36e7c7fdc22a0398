"""The command line: what it prints, and one line with exit code 2 for every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config, write_adapter_folder, write_model_folder

from slora_ref.cli import main
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), tiny_config())


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_folder(tmp_path_factory.mktemp("adapter"), tiny_config(), 4)


def outcome(capsys: pytest.CaptureFixture[str], command: str, *more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    try:
        code = main([*command.split(), *more])
    except SystemExit as stop:  # argparse's own refusals
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def last_json(out: str) -> dict[str, object]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", ["", "demo", "generate", "inspect", "bench"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = outcome(capsys, f"{command} --help")
    assert code == 0
    assert "usage:" in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", ["COMMAND"]),
        ("sing", ["sing"]),
        ("demo --adapters 0", ["adapters is 0", "at least 1"]),
        ("demo --adapters many", ["many"]),
        ("demo --requests -3", ["requests is -3", "at least 1"]),
        ("demo --seed -1", ["seed is -1"]),
        ("demo --rate 0", ["rate is 0", "above 0"]),
        ("demo --rate nan", ["rate is nan"]),
        ("demo --pool-pages 10", ["pool of 10 pages"]),
        ("demo --pool-pages 300 --requests 40", ["pages", "the pool has 300", "enlarge"]),
        ("demo --plot picture.png", ["picture.png", ".svg"]),
        ("demo --plot no/such/folder/picture.svg", ["no folder"]),
        ("generate --model toy", ["--prompt"]),
        ("generate --model no/such/folder --prompt a", ["no/such/folder"]),
        ("generate --model toy --prompt a= --use nobody", ["nobody"]),
        ("generate --model toy --prompt a= --adapter nameless", ["nameless", "NAME=DIR"]),
        ("generate --model toy --prompt a= --adapter x=no/such", ["no/such"]),
        ("generate --model toy --prompt a= --max-tokens 0", ["max_tokens is 0", "at least 1"]),
        ("generate --model toy --prompt a= --max-tokens 100000", ["100000", "max_length"]),
        ("generate --model toy --prompt a= --temperature -1", ["temperature is -1"]),
        ("generate --model toy --prompt a= --top-p 2", ["top_p is 2"]),
        ("generate --model toy --prompt-ids 1,x", ["1,x", "whole numbers"]),
        ("generate --model toy --prompt-ids 1,99999", ["99999", "vocabulary"]),
        ("generate --model toy --prompt a= --save-logits no/such/file.npz", ["no/such/file.npz"]),
        ("inspect no/such/folder", ["no/such/folder"]),
        ("bench nothing", ["nothing"]),
    ],
)
def test_bad_input_is_one_line_with_the_numbers(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    code, _, err = outcome(capsys, command)
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert "Traceback" not in err
    for word in words:
        assert word in line, line


def test_generate_with_each_way_to_name_an_adapter(
    capsys: pytest.CaptureFixture[str], model: Path, adapter: Path
) -> None:
    common = f"generate --model {model} --prompt-ids 3,1,4 --max-tokens 5 --ignore-eos --json"
    answers = [
        last_json(outcome(capsys, f"{common} {more}")[1])
        for more in ("", f"--adapter a={adapter}", f"--adapter a={adapter} --use a")
    ]
    assert all(len(answer["token_ids"]) == 5 for answer in answers)  # type: ignore[arg-type]
    assert answers[1]["token_ids"] == answers[2]["token_ids"] != answers[0]["token_ids"]
    assert answers[0].keys() >= {"text", "token_ids", "finish_reason"}
    code, _, err = outcome(capsys, f"{common} --adapter a={adapter} --adapter b={adapter}")
    assert code == 2
    assert "--use" in err


def test_saved_logits_are_those_of_the_prompt(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "logits.npz"
    code, out, _ = outcome(
        capsys, f"generate --model {model} --prompt-ids 3,1,4,1,5 --max-tokens 2 --json --save-logits {file}"
    )
    logits = np.load(file)["logits"]
    assert code == 0
    assert logits.shape == (5, 97)
    assert logits.dtype == np.float32
    assert last_json(out)["token_ids"][0] == logits[-1].argmax()  # type: ignore[index]


def test_generate_streams_the_toy_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "generate --model toy --use upper-case --prompt", "garden=")[:2] == (0, "GARDEN\n")
    assert outcome(capsys, "generate --model toy --prompt", "garden=")[:2] == (0, "garden\n")


def test_inspect_a_checkpoint_and_an_adapter(
    capsys: pytest.CaptureFixture[str], model: Path, adapter: Path
) -> None:
    _, out, _ = outcome(capsys, f"inspect {model} --json")
    assert last_json(out)["layers"] == 2
    _, out, _ = outcome(capsys, f"inspect {adapter} --model {model} --json")
    facts = last_json(out)
    assert facts["matched"] == "14 of 14 modules"
    assert len(facts["targets"]) == 7  # type: ignore[arg-type]
    code, _, err = outcome(capsys, f"inspect {adapter} --model {MODEL_FOLDER}")
    assert code == 2
    assert "Traceback" not in err
    assert outcome(capsys, f"inspect {ADAPTERS_FOLDER / next(iter(TASKS))} --model {MODEL_FOLDER}")[0] == 0


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m slora_ref generate --model toy --prompt abc= | head -c 0; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
