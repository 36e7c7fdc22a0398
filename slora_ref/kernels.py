"""Where the CUDA kernels lie: inside the package when it was installed from a wheel, beside it in a checkout.

Knows one folder and nothing of what is in it.
"""

from __future__ import annotations

from pathlib import Path

from slora_ref.errors import KernelsNotFound

KERNELS = "kernels_cu"


def kernels_folder(package: Path = Path(__file__).parent) -> Path:
    """Find the folder of the `.cu` files: `slora_ref/kernels_cu`, else `kernels_cu` beside the package.

    Raises KernelsNotFound, which names both places.
    """
    places = (package / KERNELS, package.parent / KERNELS)
    for place in places:
        if place.is_dir():
            return place
    raise KernelsNotFound(
        f"no folder of CUDA kernels: neither {places[0]} nor {places[1]} exists; "
        "reinstall slora_ref, or work from a complete checkout"
    )
