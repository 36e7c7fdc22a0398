"""The demo: thousands of registered adapters, one small pool, every answer checked."""

from slora_ref.demo.options import DemoOptions
from slora_ref.demo.report import DemoReport
from slora_ref.demo.run import run_demo

__all__ = ["DemoOptions", "DemoReport", "run_demo"]
