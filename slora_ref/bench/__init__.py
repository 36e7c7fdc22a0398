"""Measurements, each with the machine, the versions and the command that made it."""

from slora_ref.bench.host import bench_host
from slora_ref.bench.machine import machine_facts

__all__ = ["bench_host", "machine_facts"]
