"""Claim: a model is updated within 8 hours of a change of the traffic, with nobody's help and without forgetting.

The product's own demonstration (`modelwright continual demo`), three times, each from an empty folder: a first model in
service, users who begin to ask about other libraries, the drift monitor, the update with replay, the gate on the
quantized model, an A/B test on the running server, the promotion. The time is that from the change of the traffic to
the new model in service. The users, their number and the size of the model are the demonstration's.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.progress import SilentProgress
from modelwright.pipeline.stage import RunConfig
from modelwright.recipes.load import load
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import Estimate, estimate
from modelwright_continual.benchmark import Task
from modelwright_continual.demo.run import REPLAY, Demo, DemoResult, run_demo
from modelwright_continual.demo.size import DemoSize
from modelwright_continual.gate.judge import FOLDER
from modelwright_continual.gate.judge import Verdict as GateVerdict

NUM_RUNS = 3
MOST_HOURS = 8.0
BEFORE_HOURS = 7 * 24.0
MOST_FORGOTTEN = 2.0
"""Percent of the old texts' bits per byte: the margin of the gate."""
HANDSOFF, OLD, NEW, FAILED, ENDED = "hands-off s", "old texts", "new texts", "failed requests", "promoted"
WHOLE = "whole demonstration s"
CHANGES: Mapping[str, Task] = {OLD: "old", NEW: "new"}
MODELS = ("before", "after", "capacity floor")

SMALL = DemoSize(
    fraction=0.15, most={"old": 300, "new": 150}, most_heldout=60, window=60, num_windows=5, run_length=5.0,
    shifted={"old": 0.0, "new": 1.0}, min_units=5,
)  # fmt: skip
"""Shows that the measurement runs; its update hardly learns anything."""
SMALL_MODEL: Mapping[str, Any] = {
    "tokenizer": {"vocab_size": 512},
    "model": {"vocab_size": 512, "num_layers": 1, "model_dim": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 128},
    "pretrain": {"num_steps": 20},
}


def measure(setting: Setting) -> Measurement:
    results = [_run(setting, setting.folder / f"demo-{number}") for number in range(1 if setting.quick else NUM_RUNS)]
    config, size, _, gate = results[0]
    outcomes = [result for _, _, result, _ in results]
    return Measurement(
        samples=samples_of(outcomes, gate),
        conditions={
            "runs": len(outcomes),
            "ended": ", ".join(sorted({result.loop.ending for result in outcomes})),
            "replay": f"{100 * REPLAY:.0f}%",
            "requests": sum(result.num_answered + len(result.failures) for result in outcomes),
            "window of the drift monitor": f"{size.window} requests",
            "sessions of the A/B test": f"{size.min_units} in each arm",
            "parameters": config.model.num_parameters,
            "traffic": "made-up users; the server, its log, both trainings, the gate and the A/B test are real",
            "bounds of old texts": f"the gate's, one-sided, over documents, first run; margin {MOST_FORGOTTEN:g}%",
        },
    )


def _run(setting: Setting, folder: Path) -> tuple[RunConfig, DemoSize, DemoResult, GateVerdict]:
    sources = {"data": {"sources": [str((folder / "texts" / "old.jsonl").resolve())]}}
    settings = {**SMALL_MODEL, **sources} if setting.quick else sources
    config = load("continual-demo", settings, str(folder / "first")).config
    size = SMALL if setting.quick else DemoSize()
    demo = Demo(folder=folder, config=config, words=["continual", "demo"], progress=SilentProgress(), size=size)
    result = run_demo(demo)
    return config, size, result, GateVerdict.read(demo.update.path / FOLDER)


def samples_of(results: Sequence[DemoResult], verdict: GateVerdict) -> dict[str, list[float]]:
    """Times of all runs, and changes of bits per byte in percent in the first: change, lower and upper bound."""
    first, handsoff = results[0], [result.handsoff_s for result in results if result.handsoff_s is not None]
    samples = {
        FAILED: [float(len(result.failures)) for result in results],
        ENDED: [float(result.loop.ending == "promoted") for result in results],
        WHOLE: [result.total_s for result in results],
        **({HANDSOFF: handsoff} if handsoff else {}),
    }
    old, updated, floor = first.floor.rows
    for name, task in CHANGES.items():
        samples[f"bits per byte, {name}"] = [row.bits[task] for row in (old, updated, floor)]
        for measure in verdict.measures:
            is_bits = measure.task == task and measure.name.startswith("bits per byte")
            if is_bits and math.isfinite(measure.high - measure.low):
                ends = (measure.difference, measure.low, measure.high)
                samples[f"change of {name}"] = [100 * end for end in ends]
    return samples


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    judgment.require(all(samples[ENDED]), f"the loop ended with {conditions['ended']}, so no new model is served")
    judgment.require(not sum(samples[FAILED]), f"{sum(samples[FAILED]):.0f} requests failed")
    with judgment.part():
        hours = estimate([seconds / 3600 for seconds in samples[HANDSOFF]])
        judgment.ask("hands-off time", hours, "h", "<=", MOST_HOURS)
        judgment.ask("shorter than a week", BEFORE_HOURS / hours.mean, "x")
        judgment.said.append(f"{60 * hours.mean:.1f} minutes from the changed traffic to the new model in service")
    judgment.note("whole demonstration", lambda: samples[WHOLE][0] / 60, "min")
    for name in CHANGES:
        with judgment.part():
            change, lower, upper = samples[f"change of {name}"]
            found = Estimate(mean=change, spread=0.0, count=2, lower=lower, upper=upper)
            limit = ("<=", MOST_FORGOTTEN) if name == OLD else ("<", 0.0)
            judgment.ask(f"change of {name}", found, "%", *limit, say=name + " {0.mean:+.2f}%")
        with judgment.beside():
            for which, bits in zip(MODELS, samples[f"bits per byte, {name}"], strict=True):
                judgment.ask(f"{name}, {which}", bits, "bits per byte")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="A model is updated within 8 hours of a change of the traffic, with nobody's help and without "
    "forgetting.",
    source="published with the system's description, without a paper",
    published="monthly update 7 days -> 8 hours; model, data and machine not told",
    compared="one run of `continual demo`: from the moment when users ask about other libraries to the promotion of "
    "the updated model on the running server; bits per byte of old and new texts before and after, and those of the "
    "capacity floor; beside it the time of the whole demonstration, with the first training and the floor's",
    target=f"at most {MOST_HOURS:g} hours, no failed request, old texts at most {MOST_FORGOTTEN:g}% worse and new ones "
    "better (the gate's bounds)",
    headline=("hands-off time", f"change of {OLD}", f"change of {NEW}"),
)
