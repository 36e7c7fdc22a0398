"""Measurements, each with the machine, the versions and the command that made it."""

from slora_ref.bench.host import bench_host
from slora_ref.bench.machine import copy_gb_s, machine_facts

__all__ = ["bench_host", "copy_gb_s", "machine_facts"]
