"""The rules of the project that no single module can keep: length, order of imports, optional packages, packaging."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import slora_ref
from slora_ref.ops.numpy_ops import NumpyOps
from slora_ref.shapes import Array, Float

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "slora_ref"

# A module imports only from those before it. `__init__` re-exports the public names, so it comes after the engine.
ORDER = """
    errors options shapes kernels config request allocator tp ops pager checkpoint adapter tokenizer text store prefetch
    device_loader step batch rope reference model sampler policy scheduler clock executor engine __init__ metrics
    workload simulate baselines paper toy synthetic bench demo cli __main__
""".split()

# What `pip install slora_ref` alone does not bring: nothing may need it to be imported, with two exceptions.
CUPY = frozenset("cupy cupyx cupy_backends".split())
ORACLE = frozenset("torch transformers peft".split())
OPTIONAL = CUPY | ORACLE | frozenset("matplotlib jinja2 mpi4py jaxtyping beartype hypothesis pytest".split())
MAY_NEED_CUPY = ("slora_ref.ops.cuda", "slora_ref.tp.", "slora_ref.bench.kernels.")
MAY_NEED_ORACLE = ("slora_ref.toy.", "slora_ref.bench.peft_baseline.m")  # of the latter measure and model


def module_name(path: Path) -> str:
    """slora_ref/config/model.py -> slora_ref.config.model, and a package's __init__.py -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module: str) -> int:
    """Index in ORDER of the module, or of the package of slora_ref that it belongs to."""
    return ORDER.index(module.split(".")[1] if "." in module else "__init__")


@functools.cache
def imports(module: str) -> frozenset[tuple[str, int]]:
    """Every module of slora_ref that `module` imports, at any depth of its code, with the line."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(
        (found, node.lineno)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported_names(node, package)
        if (found := longest_module(name))
    )


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Full dotted names that an import statement asks for, relative ones resolved."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        origin = ".".join(filter(None, (base, node.module)))
        yield from (f"{origin}.{alias.name}" for alias in node.names)


def longest_module(name: str) -> str:
    """The module of slora_ref that a dotted name means, the longest prefix that is one; empty when none is."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in MODULES), "")


@pytest.mark.parametrize(
    ("folder", "pattern", "most"), [("slora_ref", "*.py", 250), ("kernels_cu", "*.cu", 130), ("kernels_cu", "*.h", 250)]
)
def test_no_file_is_longer_than_a_reader_can_hold(folder: str, pattern: str, most: int) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob(pattern)}
    too_long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > most}
    assert not too_long, f"split by noun, at most {most} lines: {too_long}"


def test_every_module_has_a_place_in_the_order() -> None:
    tops = {module.split(".")[1] for module in MODULES if "." in module}
    assert tops <= set(ORDER), f"add to ORDER, at its place: {sorted(tops - set(ORDER))}"
    assert len(ORDER) == len(set(ORDER))


def test_imports_only_from_modules_above() -> None:
    assert not [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {target}"
        for module in MODULES
        for target, line in imports(module)
        if place(target) > place(module)
    ]


def test_a_package_is_not_imported_by_its_own_modules() -> None:
    """config/engine.py takes what it needs from config/model.py, not from config, which is made of both."""
    assert not [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {target}"
        for module in MODULES
        for target, line in imports(module)
        if module.startswith(target + ".") and target != "slora_ref"
    ]


def test_no_module_imports_itself_by_a_detour() -> None:
    """Within a package ORDER says nothing; there, too, the modules can be laid in a row."""
    done: set[str] = set()
    while len(done) < len(MODULES):
        ready = {module for module in MODULES if {target for target, _ in imports(module)} <= done | {module}} - done
        assert ready, f"import each other in a circle: {sorted(MODULES.keys() - done)}"
        done |= ready


def test_the_order_is_really_checked() -> None:
    code = "from . import model\nfrom ..engine import Engine\nfrom slora_ref.config import model as m"
    statements = ast.parse(code).body
    names = [name for node in statements for name in imported_names(node, "slora_ref.config")]
    assert names == ["slora_ref.config.model", "slora_ref.engine.Engine", "slora_ref.config.model"]
    assert longest_module("slora_ref.config.ModelConfig") == "slora_ref.config"
    assert longest_module("slora_ref.__version__") == "slora_ref"
    assert longest_module("numpy.random") == ""
    assert place("slora_ref.config.model") < place("slora_ref.engine") < place("slora_ref")
    assert sum(len(imports(module)) for module in MODULES) > len(MODULES)


def needed(module: str) -> set[str]:
    """Optional libraries that `module` itself imports as soon as it is imported."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {name.partition(".")[0] for node in tree.body for name in imported_names(node, module)} & OPTIONAL


def test_optional_packages_are_imported_at_module_level_only_where_all_is_about_them() -> None:
    allowed = {
        module: (CUPY if module.startswith(MAY_NEED_CUPY) else set())
        | (ORACLE if module.startswith(MAY_NEED_ORACLE) else set())
        for module in MODULES
    }
    found = {module: needed(module) - allowed[module] for module in MODULES}
    assert not {module: libraries for module, libraries in found.items() if libraries}


WITHOUT_OPTIONAL = """
import importlib, importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
IMPORT_ALL = """
for name in {modules!r}:
    importlib.import_module(name)
    print(name)
"""
DEMO = """
from slora_ref.cli import main
sys.exit(main("demo --adapters 40 --requests 8 --json".split()))
"""


def run_without_optional_packages(code: str) -> str:
    """Run code in an interpreter where none of OPTIONAL can be imported, and return what it printed."""
    script = WITHOUT_OPTIONAL.format(optional=sorted(OPTIONAL)) + code
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_can_be_imported_without_the_extras() -> None:
    modules = set(MODULES)
    while excused := {m for m in modules if needed(m) or {target for target, _ in imports(m)} - modules}:
        modules -= excused
    assert {"slora_ref.cli", "slora_ref.engine", "slora_ref.toy"} <= modules
    printed = run_without_optional_packages(IMPORT_ALL.format(modules=sorted(modules)))
    assert printed.split() == sorted(modules)


def test_the_demo_runs_without_the_extras() -> None:
    assert '"wrong": 0' in run_without_optional_packages(DEMO).splitlines()[-1]


@functools.cache
def setup_cfg() -> configparser.ConfigParser:
    """setup.cfg, parsed."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_every_package_is_in_the_wheel() -> None:
    listed = set(setup_cfg()["options"]["packages"].split())
    found = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert listed == found | {"slora_ref.kernels_cu"}, "make [options] packages of setup.cfg equal to the folders"


def test_every_folder_with_modules_is_a_package() -> None:
    assert not {path.parent for path in MODULES.values()} - {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_pyproject_holds_only_the_build_system_and_ruff() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings.keys() == {"build-system", "tool"}
    assert settings["tool"].keys() == {"ruff"}


def test_the_version_is_written_once() -> None:
    assert setup_cfg()["metadata"]["version"] == "attr: slora_ref.__version__"
    assert importlib.metadata.version("slora_ref") == slora_ref.__version__


def test_one_place_bounds_a_package_that_several_extras_need() -> None:
    """matplotlib is in `plots` and in `test`: with different bounds, the tests would not test what users install."""
    extras = setup_cfg()["options.extras_require"].values()
    lines = {line.strip() for extra in extras for line in extra.splitlines() if line.strip()}
    names = [re.split(r"[^\w-]", line)[0] for line in lines]
    assert len(names) == len(set(names)), sorted(lines)


def test_the_commands_of_the_readme_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named <= targets


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listing.decode().split("\0") if name and (ROOT / name).is_file()]
    homes = re.compile(rb"(?<![\w.~-])/(?:home|Users|root|work|mnt)/\w")
    places = [str(folder).encode() for folder in {ROOT, Path.home()} if len(folder.parts) > 2]
    contents = {path: path.read_bytes() for path in files}
    found = [path for path, data in contents.items() if homes.search(data) or any(place in data for place in places)]
    assert len(files) > 10
    assert not found


@jaxtyped(typechecker=beartype)
def product(x: Float[Array, "rows rank"], y: Float[Array, "rank d_out"]) -> Float[Array, "rows d_out"]:
    """As a function of slora_ref looks after conftest.py's hook has seen it."""
    return x @ y


def test_a_wrong_shape_is_refused_in_the_test_run() -> None:
    """Or the annotations are decoration."""
    product(np.zeros((2, 3)), np.zeros((3, 4)))
    for wrong in (np.zeros((2, 4)), np.zeros((3, 4), np.int64), np.zeros(3)):
        with pytest.raises(TypeCheckError):
            product(np.zeros((2, 3)), wrong)


def test_the_shape_checks_reach_the_modules() -> None:
    with pytest.raises(TypeCheckError):
        NumpyOps().linear(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    checked = [module for module in MODULES if "slora_ref.shapes" in {target for target, _ in imports(module)}]
    checked = [module for module in checked if not needed(module) & CUPY]  # those are imported where there is CuPy
    assert len(checked) > 5
    for module in checked:
        functions = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
        own = {name: function for name, function in functions if function.__module__ == module}
        assert not {name for name, function in own.items() if not hasattr(function, "__wrapped__")}


def test_annotations_can_be_evaluated() -> None:
    """A name imported only under TYPE_CHECKING makes the shape checks of its functions vanish without a word."""
    hidden = {name for name, path in MODULES.items() if "TYPE_CHECKING" in path.read_text(encoding="utf-8")}
    assert hidden == {"slora_ref.shapes"}
