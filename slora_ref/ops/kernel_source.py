"""The text of a kernel and the macro that chooses its number type. It knows files, and no compiler.

Both compilers get the same .cu file. NVRTC reads no folders here: each header is put in the place of its #include, with
#line so that messages still name the file and line that a reader sees.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from slora_ref.errors import KernelError
from slora_ref.kernels import kernels_folder

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}
INCLUDE = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)


def dtype_macro(dtype: Any) -> str:
    """The name of the macro that device.h wants for a dtype of storage.

    Raises:
        KernelError: kernels have no such numbers.
    """
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise KernelError(f"kernels store {', '.join(DTYPES)}, not {name}")
    return f"DTYPE_{name.upper()}"


def kernel_path(kernel: str, folder: Path | None = None) -> Path:
    """The .cu file of a kernel."""
    return (folder or kernels_folder()) / f"{kernel}.cu"


def whole_source(kernel: str, folder: Path | None = None) -> str:
    """A kernel's file with the headers that it includes, each once. host/ stays out: it is not for NVRTC."""
    path, done = kernel_path(kernel, folder), set[str]()

    def insert(path: Path) -> str:
        text = path.read_text(encoding="utf-8")

        def header(found: re.Match[str]) -> str:
            if found[1] in done:
                return ""
            done.add(found[1])
            line = text.count("\n", 0, found.end()) + 2
            own = path.with_name(found[1])
            return insert(own if own.exists() else kernels_folder() / found[1]) + f'#line {line} "{path.name}"'

        return f'#line 1 "{path.name}"\n' + INCLUDE.sub(header, text)

    return insert(path)
