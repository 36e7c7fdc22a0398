"""The command line: what it prints, and one line with exit code 2 for every kind of bad input."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_config, write_adapter_folder, write_model_folder

from slora_ref.bench.serve.rows import SERVE_HEAD
from slora_ref.cli import main
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER, TASKS


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
        ("demo --rate 0", ["rate is 0", "from 0.001"]),
        ("demo --rate 1e-320", ["rate is 1e-320", "from 0.001"]),
        ("demo --rate inf", ["rate is inf", "1,000,000"]),
        ("demo --rate nan", ["rate is nan"]),
        ("demo --pool-pages 10", ["the pool has 10 pages", "the largest request takes", "--pool-pages"]),
        ("demo --pool-pages 300 --requests 40", ["the pool has 300 pages", "enlarge", "--pool-pages"]),
        ("demo --pool-pages 10000000000000", ["--pool-pages is 10000000000000", "at most 1,000,000"]),
        ("demo --pool-pages 99999999999999999999999", ["99999999999999999999999", "at most 1,000,000"]),
        ("demo --requests 10000000000000", ["requests is 10000000000000", "at most 100,000"]),
        ("demo --adapters 1000000000000", ["adapters is 1000000000000", "at most 100,000"]),
        ("demo --plot picture.png", ["picture.png", ".svg"]),
        ("demo --plot no/such/folder/picture.svg", ["no folder"]),
        ("generate --model toy", ["--prompt"]),
        ("generate --model no/such/folder --prompt a", ["config.json in 'no/such/folder', which is no folder"]),
        ("generate --model toy --prompt a= --use nobody", ["'nobody'", "known: caesar-1, caesar-3", ", ..."]),
        (f"generate --model {MODEL_FOLDER} --prompt a= --use nobody", ["'nobody'", "--adapter NAME=DIR"]),
        ("generate --model toy --prompt a= --adapter nameless", ["nameless", "NAME=DIR"]),
        ("generate --model toy --prompt a= --adapter x=no/such", ["no/such', which is no folder"]),
        ("generate --model toy --prompt a= --max-tokens 0", ["--max-tokens is 0", "at least 1"]),
        ("generate --model toy --prompt a= --max-tokens 100000", ["100000", "max_length"]),
        ("generate --model toy --prompt a= --temperature -1", ["temperature is -1"]),
        ("generate --model toy --prompt a= --top-p 2", ["--top-p is 2"]),
        ("generate --model toy --prompt a= --stop=", ["--stop is ''", "not empty"]),
        ("generate --model toy --prompt a= --enforce-eager", ["--enforce-eager needs --device cuda"]),
        ("generate --model toy --prompt-ids 1,x", ["1,x", "whole numbers"]),
        ("generate --model toy --prompt-ids 1,99999", ["99999", "vocabulary"]),
        ("generate --model toy --prompt a= --save-logits no/such/file.npz", ["no/such/file.npz"]),
        ("inspect no/such/folder", ["there is no folder 'no/such/folder'"]),
        ("inspect README.md", ["there is no folder 'README.md'"]),
        ("inspect tests", ["'tests' has neither config.json nor adapter_config.json"]),
        (f"inspect {'n' * 300}", ["nnn", "File name too long"]),
        (f"inspect {ADAPTERS_FOLDER / 'upper-case'} --model {'n' * 300}", ["nnn", "File name too long"]),
        (f"generate --model {'n' * 300} --prompt a=", ["nnn"]),
        ("bench nothing", ["nothing"]),
        ("bench serve --lengths 5", ["--lengths are 5; give two numbers, LOW,HIGH"]),
        ("bench load --lengths 5,6,7", ["--lengths are 5, 6, 7; give two numbers, LOW,HIGH"]),
        ("bench serve --max-running 0", ["--max-running is 0", "1"]),
        ("bench serve --max-batched-tokens 0", ["--max-batched-tokens is 0", "1"]),
        ("bench serve --rate 1e-9", ["rate is 1e-09", "from 0.001"]),
        ("bench serve --eviction lru,cost", ["--eviction is lru,cost", "bench serve takes one, bench load several"]),
        ("bench decode --batch 0", ["--batch is 0", "at least 1"]),
        ("bench serve --model llama-7b", ["--model is llama-7b; it needs a GPU: add --device cuda"]),
        ("bench decode --ranks 0", ["--ranks are 0; give"]),
        ("bench decode --targets no", ["--targets are no; they can be q_proj"]),
        ("bench decode --targets ,", ["--targets are none; they can be q_proj"]),
        ("demo --model toy", ["'toy' is no folder", "without --model: the toy"]),
        ("bench decode --mode fast", ["--mode is 'fast'", "graph or eager"]),
        ("demo --communicator threads", ["--communicator threads", "add --shards N"]),
        ("inspect toy --model toy", ["--model is the base of an adapter", "leave it out"]),
        ("paper fragmentation --variant ours", ["fragmentation is a study", "--variant"]),
        ("paper fragmentation --out README.md", ["--out README.md", "File exists", "name a folder"]),
    ],
)
def test_bad_input_is_one_line_with_the_numbers(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    code, _, err = outcome(capsys, command)
    assert code == 2
    lines = err.strip().splitlines()
    line = lines[-1]
    assert "Traceback" not in err
    assert len(lines) == 1 or lines[0].startswith("usage:")  # argparse says how to use it, too
    assert len(line) < 600
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


def test_inspect_knows_the_toy_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "inspect toy --json")
    facts = last_json(out)
    assert code == 0
    assert facts["tokenizer"] == "98 tokens"
    assert "NaN" in str(facts["weights"])
    code, out, _ = outcome(capsys, f"inspect {ADAPTERS_FOLDER / 'upper-case'} --model toy --json")
    assert code == 0
    assert "NaN" in str(last_json(out)["weights"])


def test_inspect_says_that_a_tokenizer_would_be_refused(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    assert last_json(outcome(capsys, f"inspect {folder} --json")[1])["tokenizer"] == "none: prompts are token ids"
    (folder / "tokenizer.json").write_text("{}")
    code, out, err = outcome(capsys, f"inspect {folder}")
    assert code == 2
    assert "refused: tokenizer.json cannot be read" in out
    assert "tokenizer.json cannot be read" in err
    assert outcome(capsys, f"generate --model {folder} --prompt-ids 1")[0] == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (json.dumps({"base_model_name_or_path": "m" * 5000}), "--model DIR"),
        (json.dumps({"base_model_name_or_path": "a\0b"}), "--model DIR"),
        (json.dumps({"base_model_name_or_path": 7}), "--model DIR"),
        ('{"a":' * 20_000, "cannot be read as JSON"),
        ("[]", "an object"),
        ("\xff", "cannot be read as JSON"),
    ],
)
def test_inspect_reads_a_strangers_config_with_care(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str, words: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(config, encoding="latin-1")
    code, _, err = outcome(capsys, f"inspect {tmp_path}")
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert len(err) < 600


def test_a_folder_that_may_not_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the operating system's refusal is played."""

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    code, _, err = outcome(capsys, "inspect some/folder")
    assert (code, err.count("\n")) == (2, 1)
    assert "'some/folder' cannot be read: Permission denied" in err


def test_a_request_that_ends_by_an_error_is_bad_input(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """An adapter whose weights are refused when they are loaded: the message goes to stderr, the JSON stays whole."""
    bad = write_adapter_folder(tmp_path / "bad", tiny_config(), 4)
    file = bad / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    for more in ("", "--json"):
        code, out, err = outcome(capsys, f"generate --model {model} --adapter bad={bad} --prompt-ids 3,1,4 {more}")
        assert code == 2
        assert "bad" in err
        assert err.count("\n") == 1
        assert "error" not in out or last_json(out)["finish_reason"] == "error"


@pytest.mark.parametrize("command", ["demo", "generate", "inspect", "bench"])
def test_help_has_no_empty_defaults(capsys: pytest.CaptureFixture[str], command: str) -> None:
    out = outcome(capsys, f"{command} --help")[1]
    assert "default: None" not in out
    assert "default: False" not in out
    assert ("default: 2000" in out) == (command == "demo")


def test_help_says_what_lists_are_by_default_and_what_columns_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """As text of one line: argparse breaks lines where the terminal ends."""
    decode, serve, demo = (
        " ".join(outcome(capsys, f"{command} --help")[1].split()) for command in ("bench decode", "bench serve", "demo")
    )
    for needed in ("(default: 64,128)", "(default: 0,1,8,32,64,128)", "(default: q_proj,k_proj,v_proj,o_proj)"):
        assert needed in decode
    for column in ("of first", "by bytes", "waits p99", "hits", "prepared"):
        assert column in SERVE_HEAD and f"{column}: " in serve
    assert "(default: 8)" in serve and "llama-7b, llama-13b, llama-30b (random" in demo


# --- a GPU that is not there ---

ON_GPU = ["demo --device cuda", "generate --model toy --prompt a= --device cuda", "paper fig5 --device cuda"]
ON_GPU += ["bench kernels", "bench decode", "bench serve --device cuda", "bench load --device cuda --model llama-7b"]


@pytest.mark.parametrize("command", ON_GPU)
def test_without_cupy_a_gpu_is_refused_with_what_to_type(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pip of this Python, so that the package lands where the command looks for it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = outcome(capsys, command)
    assert code == 2 and err.count("\n") == 1
    assert f"CuPy: {sys.executable} -m pip install -e '.[cuda12]', or [cuda13]" in err


@pytest.mark.parametrize("command", ON_GPU)
@pytest.mark.parametrize("fails", [True, False])
def test_with_cupy_and_no_gpu_there_is_one_line(
    command: str, fails: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy can be installed where there is no GPU, or a driver that is older than its CUDA."""

    def count() -> int:
        if fails:
            raise RuntimeError("the driver is insufficient")
        return 0

    cupy = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=SimpleNamespace(CUDARuntimeError=RuntimeError, getDeviceCount=count)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    code, _, err = outcome(capsys, command)
    assert code == 2 and err.count("\n") == 1
    assert "needs an NVIDIA GPU, and CuPy finds none" in err
    assert not fails or "the driver is insufficient" in err
