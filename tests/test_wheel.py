"""What a user installs works outside the checkout: from a wheel, from an editable installation, from a bare checkout.

Each way gets an environment of its own, which sees the dependencies of this one but not its slora_ref.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = "slora_ref kernels_cu setup.cfg pyproject.toml LICENSE README.md".split()
FIND_KERNELS = "import slora_ref.kernels as k; print(k.__file__); print(k.kernels_folder())"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its standard output; fail with all that it printed."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} in {cwd}:\n{done.stdout}{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, python: Path | str = sys.executable, cwd: Path) -> None:
    """Run this environment's pip on the environment of `python`; builds need no download and no isolation."""
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    command, *rest = arguments
    run(sys.executable, "-m", "pip", "--python", python, command, *options, *rest, cwd=cwd)


def new_environment(folder: Path) -> Path:
    """Make a virtual environment that can import the dependencies installed here, and return its bin folder."""
    venv.create(folder, symlinks=True)
    bin_folder = folder / "bin"
    site = run(bin_folder / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # A line in a .pth file joins that folder to the path, and ignores the .pth files (our editable installation) in it.
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return bin_folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made from, so that building leaves nothing behind here."""
    copy = tmp_path_factory.mktemp("checkout")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=leave)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, copy / part)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", folder, checkout, cwd=folder)
    (built,) = folder.glob("slora_ref-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment into which the wheel was installed."""
    bin_folder = new_environment(tmp_path_factory.mktemp("installed"))
    pip("install", wheel, python=bin_folder / "python", cwd=wheel.parent)
    return bin_folder


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with an editable installation of the copied checkout."""
    bin_folder = new_environment(tmp_path_factory.mktemp("editable"))
    pip("install", "--editable", checkout, python=bin_folder / "python", cwd=checkout)
    return bin_folder


def test_the_wheel_holds_every_file_of_the_package_and_the_kernels(wheel: Path, checkout: Path) -> None:
    sources = {path.relative_to(checkout) for path in (checkout / "slora_ref").rglob("*") if path.is_file()}
    kernels = {path.relative_to(checkout) for path in (checkout / "kernels_cu").rglob("*") if path.is_file()}
    expected = {str(path) for path in sources} | {f"slora_ref/{path}" for path in kernels}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_wheel_is_small_and_installs_everywhere(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 20e6


def test_kernels_are_found_in_a_wheel(installed: Path, tmp_path: Path) -> None:
    module, folder = map(Path, run(installed / "python", "-c", FIND_KERNELS, cwd=tmp_path).splitlines())
    assert module.is_relative_to(installed.parent)
    assert folder == module.parent / "kernels_cu"


def test_kernels_are_found_in_an_editable_installation(editable: Path, checkout: Path, tmp_path: Path) -> None:
    module, folder = map(Path, run(editable / "python", "-c", FIND_KERNELS, cwd=tmp_path).splitlines())
    assert module == checkout / "slora_ref" / "kernels.py"
    assert folder == checkout / "kernels_cu"


def test_kernels_are_found_in_a_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path) / "python"
    module, folder = map(Path, run(python, "-c", FIND_KERNELS, cwd=checkout).splitlines())
    assert module == checkout / "slora_ref" / "kernels.py"
    assert folder == checkout / "kernels_cu"


def test_a_missing_folder_of_kernels_names_both_places(tmp_path: Path) -> None:
    from slora_ref.errors import KernelsNotFound
    from slora_ref.kernels import kernels_folder

    package = tmp_path / "somewhere" / "slora_ref"
    with pytest.raises(KernelsNotFound) as raised:
        kernels_folder(package)
    assert str(package / "kernels_cu") in str(raised.value)
    assert str(tmp_path / "somewhere" / "kernels_cu") in str(raised.value)


@pytest.mark.parametrize("environment", ["installed", "editable"])
def test_the_command_is_installed(environment: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    printed = run(request.getfixturevalue(environment) / "slora-ref", "--help", cwd=tmp_path)
    assert "demo" in printed


def test_the_demo_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    printed = run(installed / "slora-ref", *"demo --adapters 40 --requests 8 --json".split(), cwd=tmp_path)
    result = json.loads(printed.splitlines()[-1])
    assert (result["wrong"], result["requests"], result["adapters_registered"]) == (0, 8, 40)
