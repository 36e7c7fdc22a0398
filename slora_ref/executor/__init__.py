"""Executors: whatever can run a batch. One computes in NumPy, one by kernels."""

from slora_ref.executor.counts import PreparationCounts
from slora_ref.executor.kernel_executor import KernelExecutor
from slora_ref.executor.model_executor import ModelExecutor
from slora_ref.executor.result import Executor, FollowingExecutor, StartedStep, StepResult

__all__ = [
    "Executor",
    "FollowingExecutor",
    "KernelExecutor",
    "ModelExecutor",
    "PreparationCounts",
    "StartedStep",
    "StepResult",
]
