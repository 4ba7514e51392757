"""The peak rate of matrix products that a training's utilization refers to."""

import json
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.progress import SilentProgress
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import product_rate
from modelwright.pipeline.stage import StageContext
from modelwright.train.config import TrainConfig
from modelwright.train.state import TrainResult

_PEAK_FILE = "peak.json"
TOO_LOW = 1.02
"""Steps faster than the peak by more than this share of measurement error show that the peak is wrong."""


def peak_flops(context: StageContext, config: RunConfig, training: TrainConfig) -> float:
    """FLOP/s of the matrix products here in the stage's format: measured once, kept for resumed runs."""
    if context.ranks.rank != 0:
        return 0.0
    known = _read_peak(context)
    if not known:
        rate = product_rate(config, training.precision, context.progress.note)
        known = {"compute": training.precision.compute, "flops": rate}
        write_atomic(context.folder.path / _PEAK_FILE, json.dumps(known))
    return float(known["flops"])


def peaks_after(
    context: StageContext, config: RunConfig, training: TrainConfig, result: TrainResult
) -> dict[str, float]:
    """`live_peak_flops`, as measured before training, and `peak_flops`, the maximum of that, of the rate after training
    and of the fastest step: one measurement may fall into a busy moment of the machine, and no step is faster than the
    peak.
    """
    live = float(_read_peak(context).get("flops", 0.0))
    if not live:
        return {"live_peak_flops": 0.0, "peak_flops": 0.0}
    if result.peak_flops > TOO_LOW * live:
        context.progress.note(
            f"the peak was measured as {live / 1e9:.0f} GFLOP/s, which steps exceeded ({result.peak_flops / 1e9:.0f}), "
            "probably while other processes kept the machine busy; utilization refers to the higher rate"
        )
    after = product_rate(config, training.precision, SilentProgress().note)
    return {"live_peak_flops": live, "peak_flops": max(live, result.peak_flops, after)}


def utilization(result: TrainResult, peaks: dict[str, float], num_ranks: int) -> float:
    """Model FLOPs utilization of the whole training in [0, 1], 0 if the peak rate is unknown."""
    if not peaks["peak_flops"] or not result.train_time_s:
        return 0.0
    return result.model_flops / result.train_time_s / (peaks["peak_flops"] * num_ranks)


def _read_peak(context: StageContext) -> dict[str, Any]:
    try:
        return json.loads((context.folder.path / _PEAK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
