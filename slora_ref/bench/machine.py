"""What a measurement must carry to mean anything: the machine and the versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np


def machine_facts() -> dict[str, Any]:
    """The fields `machine` of every result; GPU fields are null where no GPU took part."""
    return {
        "gpu": None,
        "driver": None,
        "cuda": None,
        "cupy": None,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _cpu() -> str:
    """The processor's name, from Linux where it tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
