"""Numbers about a run: what became of the requests, percentiles, intervals over seeds, what the pool held."""

from slora_ref.metrics.occupancy import Occupancy
from slora_ref.metrics.service import RequestRecord, Service, summarize
from slora_ref.metrics.statistics import bootstrap_interval, percentile

__all__ = ["Occupancy", "RequestRecord", "Service", "bootstrap_interval", "percentile", "summarize"]
