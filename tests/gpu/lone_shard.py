"""On a machine with one GPU: a decode step of shard 0 of two, without the other: what two GPUs take but for the link.

LoRA's first product and message beside the base model's product, and after one another, to see what the branch saves.
Usage: python tests/gpu/lone_shard.py [llama-13b|llama-30b]
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from lone import be_alone_on_a_gpu

from slora_ref.bench.decode import DecodeOptions
from slora_ref.bench.decode.run import bench_decode
from slora_ref.ops.cuda_ops import CudaOps
from slora_ref.synthetic import AdapterKind


def main(model: str) -> int:
    """Prints two tables of `bench decode`."""
    options = DecodeOptions(
        model=model, batches=(64,), adapters=(0, 64), kind=AdapterKind(ranks=(16,)), prompt=128, output=32, shards=2
    )
    before = CudaOps.__init__

    def in_sequence(self: CudaOps, *args: object, **options: object) -> None:
        before(self, *args, **options)
        self.branch_stream = self.stream

    with pytest.MonkeyPatch.context() as patch:
        be_alone_on_a_gpu(patch)
        print(f"{model}, shard 0 of 2 alone: LoRA's messages beside the base model's products")
        rows = bench_decode(print, options)
        patch.setattr(CudaOps, "__init__", in_sequence)
        print("the same, one after the other")
        rows += bench_decode(print, options)
    for row in rows:
        print({name: round(value, 3) for name, value in row.items() if name.endswith("_ms")})
    return 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["llama-13b"])))
