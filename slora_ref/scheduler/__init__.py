"""Iteration-level scheduling: who runs in the next step (paper section 4, after Orca)."""

from slora_ref.scheduler.forecast import Forecast
from slora_ref.scheduler.peak import Lifetime, peak_tokens
from slora_ref.scheduler.scheduler import Scheduler

__all__ = ["Forecast", "Lifetime", "Scheduler", "peak_tokens"]
