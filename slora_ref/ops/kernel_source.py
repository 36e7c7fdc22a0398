"""The text of a kernel and the macro that chooses its number type. It knows files, and no compiler.

Both compilers get the same .cu file. NVRTC reads no folders here: device.h is put in the place of its #include, with
#line so that messages still name the file and line that a reader sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from slora_ref.errors import KernelError
from slora_ref.kernels import kernels_folder

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}
INCLUDE = '#include "device.h"\n'


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
    """A kernel's file with device.h in it."""
    path = kernel_path(kernel, folder)
    before, found, after = path.read_text(encoding="utf-8").partition(INCLUDE)
    assert found, f"{path} does not include device.h"
    header = path.with_name("device.h").read_text(encoding="utf-8")
    return f'{before}#line 1 "device.h"\n{header}#line {before.count(chr(10)) + 2} "{path.name}"\n{after}'
