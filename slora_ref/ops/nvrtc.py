"""The compile gate: every kernel through NVRTC for every architecture, without a GPU (`make kernels`).

NVRTC comes as a wheel (the `test` extra) or with a CUDA toolkit, and is called through ctypes. It knows sources and
architectures, but runs nothing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.errors import KernelError
from slora_ref.ops.kernel_source import DTYPES, dtype_macro, whole_source
from slora_ref.ops.rungs import RUNGS

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
OPTIONS = ("--std=c++17",)


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel.

    Args:
        registers: of a thread.
        shared: bytes of static shared memory; dynamic memory is in ops/rungs.py.
        spills: bytes that a thread writes to memory for lack of registers.
        warnings: the compiler's, empty when there are none.
    """

    kernel: str
    dtype: str
    architecture: str
    registers: int
    shared: int
    spills: int
    warnings: str


def find_nvrtc() -> Path | None:
    """The NVRTC library of the installed wheel, or of the system's toolkit; None where there is neither."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return path
    name = ctypes.util.find_library("nvrtc")
    return Path(name) if name else None


class Nvrtc:
    """NVRTC through ctypes.

    Raises:
        KernelError: the library is not installed.
    """

    def __init__(self) -> None:
        path = find_nvrtc()
        if path is None:
            raise KernelError("NVRTC is not installed: pip install nvidia-cuda-nvrtc, or a CUDA toolkit")
        self._library = ctypes.CDLL(str(path))

    def compile(self, kernel: str, dtype: Any, architecture: str, folder: Path | None = None) -> Compiled:
        """Compiles a kernel to machine code.

        Raises:
            KernelError: the compiler refuses it; the message is the compiler's.
        """
        library, program = self._library, ctypes.c_void_p()
        source = whole_source(kernel, folder).encode()
        library.nvrtcCreateProgram(ctypes.byref(program), source, f"{kernel}.cu".encode(), 0, None, None)
        options = [f"--gpu-architecture={architecture}", f"-D{dtype_macro(dtype)}", "--ptxas-options=-v", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = library.nvrtcCompileProgram(program, len(options), array)
        log = self._log(program)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        if failed:
            raise KernelError(f"NVRTC refuses {kernel} for {architecture}:\n{log}")
        return Compiled(kernel, np.dtype(dtype).name, architecture, *_read(log))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._library.nvrtcGetProgramLog(program, log)
        return log.value.decode()


def _read(log: str) -> tuple[int, int, int, str]:
    """Registers, shared bytes, spilled bytes, and the lines that are not ptxas' report."""
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise KernelError(f"NVRTC's report names no registers:\n{log}")
    shared, spills = re.search(r"(\d+) bytes smem", log), re.search(r"(\d+) bytes spill stores", log)
    other = [line for line in log.splitlines() if line.strip() and not line.startswith("ptxas")]
    return int(used[1]), int(shared[1]) if shared else 0, int(spills[1]) if spills else 0, "\n".join(other)


def main(architectures: tuple[str, ...] = ARCHITECTURES) -> int:
    """Compiles everything, prints a table, and returns 1 if anything is refused, spills or warns."""
    nvrtc, worst = Nvrtc(), 0
    print(f"{'kernel':42} {'dtype':9} registers on {' '.join(architectures)}, static shared bytes, spilled bytes")
    for kernel, rung in RUNGS.items():
        for dtype in rung.dtypes:
            try:
                done = [nvrtc.compile(kernel, DTYPES[dtype], architecture) for architecture in architectures]
            except KernelError as error:
                print(error)
                worst = 1
                continue
            registers = " ".join(f"{result.registers:5d}" for result in done)
            spills, shared = max(result.spills for result in done), max(result.shared for result in done)
            print(f"{kernel:42} {dtype:9} {registers} {shared:7d} {spills:5d} {done[0].warnings}")
            worst = max(worst, int(spills > 0 or any(result.warnings for result in done)))
    return worst


if __name__ == "__main__":
    sys.exit(main())
