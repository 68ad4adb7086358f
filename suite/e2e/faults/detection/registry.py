"""Every fault of every kind: importing this names them all."""

from suite.e2e.faults.detection import (  # noqa: F401  each registers its faults
    addressing,
    benchmarking,
    block_drafts,
    configuration,
    database,
    evaluation,
    graph,
    numeric,
    speculation,
    state,
)
from suite.e2e.faults.fault import FAULTS

__all__ = ["FAULTS"]
