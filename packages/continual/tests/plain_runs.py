"""Updates without what takes a third of their time and is tested elsewhere: the charts of their reports, and the speed
of both models, which is measured seven times over (`tests/pipeline`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from modelwright.ops.microbenchmark import in_turn


@contextmanager
def plain_runs() -> Iterator[None]:
    """Runs of this process are those of a machine without the extra `report`, and time each model once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelwright.pipeline.report.charts.is_installed", lambda extra: False)
        patch.setattr("modelwright.infer.generate.in_turn", lambda of, **options: in_turn(of, num_rounds=1))
        yield
