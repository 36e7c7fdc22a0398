"""Every mutant of kernel_mutants.py is caught by the host build, in one of the orders of threads."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_mutants import MUTANTS, SEEN_BY_RACECHECK
from kernel_shapes import fixed_cases

from slora_ref.errors import KernelError
from slora_ref.kernels import kernels_folder
from slora_ref.ops.host_kernels import ORDERS, HostKernels
from slora_ref.ops.kernel_source import kernel_path
from slora_ref.ops.ladder import ladder, make_launch, operation_of
from slora_ref.ops.rungs import RUNGS

MOST_CPU_S = 10  # of a mutant; the slowest that ends takes 3
BARRIER = re.compile(r"__sync(?:threads|warp)\(")
LAST = {ladder(operation_of(kernel), rung.dtypes[-1])[-1] for kernel, rung in RUNGS.items()}
HEADERS = sorted([*kernels_folder().glob("lora*.h"), *kernels_folder().glob("peers.h")])
EACH = [(kernel, old, new) for kernel, mutants in MUTANTS.items() for old, new in mutants]


@pytest.mark.parametrize("kernel", RUNGS)
def test_every_barrier_has_a_mutant_and_every_rung_has_two(kernel: str) -> None:
    text = kernel_path(kernel).read_text(encoding="utf-8")
    mutants = MUTANTS.get(kernel, [])
    assert len(mutants) >= 2
    if kernel in LAST:
        lines = [line for line in text.splitlines() if BARRIER.search(line)]
        removed = [old for old, new in mutants if BARRIER.search(old) and not BARRIER.search(new)]
        removed += SEEN_BY_RACECHECK.get(kernel, [])
        assert len(removed) >= len(lines), f"{len(lines)} barriers, {len(removed)} mutants that drop one"


def test_what_the_host_cannot_show_was_seen_on_a_gpu() -> None:
    log = (Path(__file__).parent / "gpu" / "h200_racecheck.log").read_text(encoding="utf-8")
    for kernel, barriers in SEEN_BY_RACECHECK.items():
        assert f"Race reported between Write access at {kernel}+" in log
        assert all(kernel_path(kernel).read_text(encoding="utf-8").count(barrier) == 1 for barrier in barriers)


def test_every_barrier_in_a_header_has_a_mutant() -> None:
    lines = [line.strip() for path in HEADERS for line in path.read_text("utf-8").splitlines() if BARRIER.search(line)]
    assert lines and set(lines) <= {old for _, old, new in EACH if not BARRIER.search(new)}


@pytest.mark.parametrize(("kernel", "old", "new"), EACH, ids=[f"{kernel}-{old}" for kernel, old, _ in EACH])
def test_a_mutant_is_caught(kernel: str, old: str, new: str, tmp_path: Path) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (kernel_path(kernel), *HEADERS)}
    found = {name: text.count(old) for name, text in texts.items() if old in text}
    assert sum(found.values()) == 1, f"{old!r} occurs: {found}"
    for name in (*found, f"{kernel}.cu"):
        (tmp_path / name).write_text(texts[name].replace(old, new), encoding="utf-8")
    assert outcome_of_a_child(lambda: caught(kernel, tmp_path)), "the mutant survives"


def caught(kernel: str, folder: Path) -> bool:
    """Whether a fixed case, in some order of threads, fails with the kernel in `folder`."""
    kernels = HostKernels(folder, folder / "cache")
    dtype = RUNGS[kernel].dtypes[0]
    for case in fixed_cases(operation_of(kernel), dtype):
        for order in ORDERS:
            arguments = case.copy()
            try:
                kernels.run(make_launch(kernel, dtype, arguments), order, seed=1)
                case.check(arguments)
            except (KernelError, AssertionError) as error:
                assert "g++ refuses" not in str(error)
                return True
    return False


def outcome_of_a_child(question: Callable[[], bool]) -> bool:
    """The answer that a forked child gives; its death by a signal is a yes, and so is that it never ends.

    A mutant writes wherever its wrong index leads. Guard pages stop what is near; what is far must not be this process.
    And one that waits for what nobody says, goes on waiting.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on where BLAS has threads; none is used
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        answer = 2  # anything unforeseen
        try:
            answer = 0 if question() else 1
        finally:
            os._exit(answer)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) in (0, 1), "the child raised something that no mutant should cause"
    return os.WEXITSTATUS(status) == 0


def test_a_child_that_dies_has_caught_the_mutant_and_one_that_raises_has_not() -> None:
    assert outcome_of_a_child(lambda: os.kill(os.getpid(), signal.SIGKILL) is None)
    assert outcome_of_a_child(lambda: True) and not outcome_of_a_child(lambda: False)
    with pytest.raises(AssertionError, match="no mutant should cause"):
        outcome_of_a_child(lambda: 1 // 0 == 0)


def test_a_child_that_never_ends_has_caught_the_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_kernels_mutants.MOST_CPU_S", 1)
    assert outcome_of_a_child(lambda: all(itertools.repeat(True)))
