"""`bench serve` and `bench load`: a whole engine under traffic, from registration to the last answer."""

from slora_ref.bench.serve.options import ServeOptions
from slora_ref.bench.serve.rows import bench_load, bench_serve

__all__ = ["ServeOptions", "bench_load", "bench_serve"]
