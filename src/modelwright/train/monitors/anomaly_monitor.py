"""Passes finished steps to the list of events (`AnomalyLog`) of the run's first rank."""

from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique


def anomaly_monitor(run: Runtime) -> Technique | None:
    """Returns None on all ranks but the first."""
    log = run.anomalies
    if log is None:
        return None
    return Technique(
        name="anomalies",
        on_step_end=log.observe,
        state=log,
        summary=lambda: {"num_events": dict(log.num_events)},
        needs=frozenset(),
    )
