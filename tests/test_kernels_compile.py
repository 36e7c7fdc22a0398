"""The compile gate: NVRTC takes every kernel for every architecture, without warnings and without spilled registers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from slora_ref.errors import KernelError
from slora_ref.kernels import kernels_folder
from slora_ref.ops.kernel_source import DTYPES, whole_source
from slora_ref.ops.nvrtc import ARCHITECTURES, Nvrtc, find_nvrtc
from slora_ref.ops.rungs import RUNGS

MOST_SHARED = 96 << 10  # what a block has on each of the architectures

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc")


@functools.cache
def nvrtc() -> Nvrtc:
    return Nvrtc()


@needs_nvrtc
@pytest.mark.parametrize("kernel", RUNGS)
def test_every_architecture_takes_the_kernel(kernel: str) -> None:
    for dtype in RUNGS[kernel].dtypes:
        for architecture in ARCHITECTURES:
            compiled = nvrtc().compile(kernel, DTYPES[dtype], architecture)
            assert 0 < compiled.registers <= 255
            assert compiled.spills == 0, f"{architecture} {dtype}: {compiled}"
            assert compiled.shared <= MOST_SHARED
            assert not compiled.warnings


@needs_nvrtc
def test_what_nvrtc_refuses_names_the_file_and_line_that_a_reader_sees(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text(
        '// computes\n#include "device.h"\n\nextern "C" __global__ void bad() { nonsense(); }\n'
    )
    with pytest.raises(KernelError, match=r'bad.cu\(4\): error: identifier "nonsense" is undefined'):
        nvrtc().compile("bad", DTYPES["float16"], "sm_90", tmp_path)


@needs_nvrtc
def test_dependent_launch_is_compiled_where_the_architecture_has_it() -> None:
    """griddepcontrol exists from sm_90 on; below, and on the host, its helpers are empty."""
    source = whole_source("mbgmv_expand_1_naive")
    assert "griddepcontrol.wait" in source
    for architecture in ARCHITECTURES:
        nvrtc().compile("mbgmv_expand_1_naive", DTYPES["float16"], architecture)


HEAD = ("// computes: ", "// arrays: ", "// map: ", "// new here: ", "// limits: ")


@pytest.mark.parametrize("path", sorted(kernels_folder().glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_is_one_readable_file(path: Path) -> None:
    """The five entries of the head; at most 100 lines of code and 130 in all; one kernel, named as the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heads = [head for line in lines for head in HEAD if line.startswith(head)]
    assert tuple(heads) == HEAD
    assert len(lines) <= 130
    assert sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines) <= 100
    assert sum("__global__" in line for line in lines) == 1
    assert f" {path.stem}(" in path.read_text(encoding="utf-8").replace("\n", " ")
    assert not [line for line in lines if len(line) > 120]


def test_headers_and_the_shim_stay_small() -> None:
    for path in kernels_folder().rglob("*.h"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 250, path.name
        assert not [line for line in lines if len(line) > 120], path.name
