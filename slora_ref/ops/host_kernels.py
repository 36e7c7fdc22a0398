"""HostKernels: compiles the .cu files with g++ and runs them on NumPy arrays, for tests and for gdb.

The compiled library of a kernel is kept in a cache folder under a name made from all that went into it, so a change of
a file is a new name. kernels_cu/host/cuda_on_cpu.h does the running; this module only packs arguments.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.errors import KernelError
from slora_ref.kernels import kernels_folder
from slora_ref.ops.kernel_source import dtype_macro, kernel_path
from slora_ref.ops.launch import Launch, extent_bytes
from slora_ref.shapes import Array

ORDERS = ("forward", "reverse", "shuffled")  # in which the threads of a block run
FLAGS = (
    "-std=c++17 -g1 -fPIC -shared -Wl,-Bsymbolic -fno-gnu-unique -fno-threadsafe-statics -ffp-contract=off "
    "-fno-strict-aliasing -U_FORTIFY_SOURCE -x c++"
).split()
MESSAGE_BYTES = 1000
MOST_STACKS = 8192  # threads, of all kernels: each takes two of the 65,530 mappings that Linux gives a process


class _Argument(ctypes.Structure):
    """shim::Argument."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("item", ctypes.c_int),
    )


class _Request(ctypes.Structure):
    """shim::Request."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("count", ctypes.c_int),
        ("message_size", ctypes.c_int),
        ("message", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(_Argument)),
    )


class HostKernels:
    """The kernels of a folder, compiled for the CPU when first used.

    Args:
        folder: of the .cu files; default: the project's. device.h and host/ are always the project's.
        cache: where compiled libraries are kept; default: ~/.cache/slora_ref/kernels.
        debug: no optimisation and all symbols, to step through a kernel in gdb.
    """

    def __init__(self, folder: Path | None = None, cache: Path | None = None, debug: bool = False) -> None:
        self.folder = folder or kernels_folder()
        self.cache = cache or Path.home() / ".cache" / "slora_ref" / "kernels"
        self._flags = [*FLAGS, "-O0" if debug else "-O1", *(["-g3"] if debug else []), f"-I{kernels_folder()}"]
        self._loaded: dict[tuple[str, str], Any] = {}

    def library(self, kernel: str, dtype: Any) -> Path:
        """Compiles a kernel, unless the cache has it.

        Raises:
            KernelError: there is no g++, or it refuses the file; the message is the compiler's.
        """
        compiler = shutil.which("g++")
        if compiler is None:
            raise KernelError("no g++ on the PATH: install it (Debian: apt install g++) to run kernels on the CPU")
        command = [compiler, *self._flags, f"-D{dtype_macro(dtype)}"]
        source = f'#include "{kernel_path(kernel, self.folder).resolve()}"\nHOST_ENTRY({kernel})\n'
        files = [kernel_path(kernel, self.folder), *sorted(kernels_folder().rglob("*.h"))]
        parts = [" ".join(command), source, *(path.read_text(encoding="utf-8") for path in files)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
        library = self.cache / f"{kernel}-{key}.so"
        if not library.exists():
            self._compile(command, source, library)
        return library

    def _compile(self, command: list[str], source: str, library: Path) -> None:
        """Writes beside the final name and renames, so that two processes never see half a file."""
        self.cache.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(suffix=".so", dir=self.cache)
        os.close(number)
        done = subprocess.run([*command, "-", "-o", name], input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            Path(name).unlink()
            raise KernelError(f"g++ refuses {library.name.rpartition('-')[0]}:\n{done.stderr}")
        Path(name).rename(library)

    def run(self, launch: Launch, order: str = "forward", seed: int = 0) -> None:
        """Runs a kernel on copies of its arguments and copies back what is not const.

        Args:
            order: in which the threads of a block run between two barriers, and the blocks: one of ORDERS.
            seed: of the shuffled order.

        Raises:
            KernelError: the kernel did what no kernel may: an access out of bounds or misaligned, a divergent barrier,
                an argument of another size; no argument was changed. Or it could not be compiled.
        """
        if 0 in launch.grid:
            return
        key = (launch.kernel, launch.dtype.name)
        if key not in self._loaded:
            self._loaded[key] = ctypes.CDLL(str(self.library(launch.kernel, launch.dtype)))
        _keep_stacks(self._loaded[key], launch.threads)
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        values = {name: None if value is None else np.asarray(value) for name, value in launch.arguments.items()}
        packed = [_pack(name, value) for name, value in values.items()]
        request = _Request(
            grid=launch.grid,
            block=(launch.threads, 1, 1),
            shared=launch.shared,
            seed=seed,
            order=ord(order[0]),
            count=len(packed),
            message_size=MESSAGE_BYTES,
            message=ctypes.cast(message, ctypes.c_char_p),
            arguments=(_Argument * len(packed))(*packed),
        )
        if self._loaded[key].host_launch(ctypes.byref(request)):
            raise KernelError(f"{launch.kernel}: {message.value.decode()}")


_stacks: OrderedDict[Any, int] = OrderedDict()  # of the process: each library's threads; the one that ran last is last


def _keep_stacks(library: Any, threads: int) -> None:
    """Threads of the kernels that ran last keep their stacks; the system does not allow a process many more."""
    _stacks[library] = max(threads, _stacks.pop(library, 0))
    while sum(_stacks.values()) > MOST_STACKS:
        _stacks.popitem(last=False)[0].release_stacks()


def _pack(name: str, value: Array | None) -> _Argument:
    """An argument as the shim wants it; a scalar is an array without dimensions."""
    if value is None:
        return _Argument(name.encode(), None, 0, ord("a"), 0)
    kind = "a" if value.ndim else "f" if value.dtype.kind == "f" else "i"
    return _Argument(name.encode(), value.ctypes.data, extent_bytes(value), ord(kind), value.itemsize)
