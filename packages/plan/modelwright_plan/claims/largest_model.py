"""Claim: in the same memory a planned step trains a model three times as large.

Depths of one width are measured in the heap of training, in processes of their own; traces only say where to begin.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.model.decoder import ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.train.config import TrainConfig
from modelwright_claims import memory_probe
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.memory_probe import Probe
from modelwright_claims.statistics import exact, ratios
from modelwright_plan.memory_plan import leanest_step, trace_step

TARGET = 3.0
CONFIGURED, CHECKPOINTED, PLANNED = "as configured", "checkpointing alone", "planned"
WAYS = (CONFIGURED, CHECKPOINTED, PLANNED)
UNITS = {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}}
FITS, DEEPER = "depth that fits, ", "depth that does not, "
PARAMETERS, FLOPS = "parameters that fit, ", "FLOPs of a step, "
NUM_STEPS = 3
"""Steps of a measurement: peaks of eight steps were within 0.3% of those of three."""
FINENESS = 40
"""A depth that fits and one that does not are at most a 40th of it apart, or one layer."""
TRACED = (2, 4)
"""Depths whose traced peaks are extended linearly to the first depth that is measured."""
SLACK_BYTES, HEAP_SHARE = 6 * 2**20, 0.95
"""What no trace shows: memory that a process takes for itself in a run, and the gaps of a heap."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: models of `width` under `limit_bytes` at each of the batch sizes, in rows of `seq_len`."""

    width: int
    seq_len: int
    rows: Sequence[int]
    limit_bytes: int
    repeats: int
    fineness: int

    def model(self, depth: int) -> ModelConfig:
        return memory_probe.probe_model(
            model_dim=self.width, num_layers=depth, vocab_size=512, seq_len=self.seq_len, head_dim=32,
            tie_embeddings=True,
        )  # fmt: skip

    def train(self, way: str, rows: int, depth: int) -> TrainConfig:
        model = self.model(depth)
        settings: dict[str, Any] = UNITS if way == CHECKPOINTED else {}
        train = memory_probe.fp32_probe(model, rows=rows, max_grad_norm=0.0, **settings).train
        return leanest_step(model, train, seq_len=self.seq_len) if way == PLANNED else train

    def probe(self, way: str, rows: int, depth: int, *, count_flops: bool = False) -> Probe:
        train = self.train(way, rows, depth)
        return Probe(
            model=self.model(depth), train=train, seq_len=self.seq_len, count_flops=count_flops, num_steps=NUM_STEPS
        )


FULL = Sizes(width=128, seq_len=256, rows=(8, 1), limit_bytes=640 * 2**20, repeats=2, fineness=FINENESS)
QUICK = Sizes(width=64, seq_len=128, rows=(4,), limit_bytes=24 * 2**20, repeats=1, fineness=3)


def measure(setting: Setting) -> Measurement:
    """Brackets the largest depth of each way, repeatedly, the ways alternated."""
    sizes = QUICK if setting.quick else FULL
    samples: dict[str, list[float]] = {}
    for rows in sizes.rows:
        tokens = f"{rows * sizes.seq_len} tokens"
        depths = {way: traced_depth(sizes, way, rows) for way in WAYS}
        for repeat in range(sizes.repeats):
            for way in WAYS:

                def peak_of(depth: int, way: str = way, rows: int = rows, repeat: int = repeat) -> float:
                    setting.progress.note(f"largest_model: {rows} rows, {way}, {depth} layers, repeat {repeat + 1}")
                    return memory_probe.measure(sizes.probe(way, rows, depth), own_heap=True)[0].peak_bytes

                fits, deeper = bracket(peak_of, sizes.limit_bytes, depths[way], fineness=sizes.fineness)
                depths[way] = fits
                found = {FITS: fits, DEEPER: deeper, PARAMETERS: sizes.model(fits).num_parameters}
                for what, value in found.items():
                    samples.setdefault(f"{what}{way}, {tokens}", []).append(value)
        counted = [sizes.probe(way, rows, depths[CONFIGURED], count_flops=True) for way in WAYS]  # of one model
        for way, (run,) in zip(WAYS, memory_probe.measure_all(counted), strict=True):
            samples[f"{FLOPS}{way}, {tokens}"] = [run.flops]
    return Measurement(
        samples=samples,
        conditions={
            "limit": f"{sizes.limit_bytes >> 20} MiB above what the process holds before the model",
            "heap": f"training's own, {NUM_STEPS} steps",
            "width": sizes.width,
            "rows": f"{sizes.seq_len} tokens, one microbatch, fp32",
            "depths measured": f"one that fits, and one at most 1/{sizes.fineness} (or a layer) deeper that does not",
        },
    )


def traced_depth(sizes: Sizes, way: str, rows: int) -> int:
    """The depth to begin with: somewhat below the one at which traced peaks reach the limit."""
    low, high = TRACED
    peaks = [
        trace_step(sizes.model(depth), sizes.train(way, rows, depth), NextToken, seq_len=sizes.seq_len).peak_bytes
        for depth in TRACED
    ]
    each = (peaks[1] - peaks[0]) / (high - low)
    return max(1, int(HEAP_SHARE * (low + (sizes.limit_bytes - SLACK_BYTES - peaks[0]) / each)))


def bracket(peak_of: Callable[[int], float], limit: float, start: int, *, fineness: int) -> tuple[int, int]:
    """Returns a depth whose peak is within the limit and a deeper one whose peak is not, at most a `fineness`-th of the
    former or one layer apart. Both are measured. start: the first depth that is tried.
    """
    fits, deeper, depth = 0, 0, start
    while True:
        peak = peak_of(depth)
        fits, deeper = (depth, deeper) if peak <= limit else (fits, depth)
        step = max(1, (fits or depth) // fineness)
        if fits and deeper and deeper - fits <= step:
            return fits, deeper
        assert deeper != 1, "one layer does not fit"
        # Peaks grow linearly, and not from zero, so that aiming in proportion stops on the side where it began.
        aim = int(depth * limit / peak)
        depth = max(aim, depth + step) if peak <= limit else min(aim, depth - step)
        depth = max(depth, fits + 1)
        depth = min(depth, deeper - 1) if deeper else depth


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    batches = names_between(samples, f"{PARAMETERS}{PLANNED}, ")
    for number, tokens in enumerate(batches):

        def times(way: str, rival: str, tokens: str = tokens) -> Any:
            return ratios(samples[f"{PARAMETERS}{way}, {tokens}"], samples[f"{PARAMETERS}{rival}, {tokens}"])

        words = {way: times(way, CONFIGURED) for way in (PLANNED, CHECKPOINTED)}
        ask, rival = f"parameters to as configured, {PLANNED}, {tokens}", f"parameters to {CHECKPOINTED}, {tokens}"
        at_least = "" if number else ">="  # the target speaks of the first batch, where activations dominate
        judgment.ask(ask, words[PLANNED], "x", at_least, TARGET)
        judgment.ask(rival, times(PLANNED, CHECKPOINTED), "x", at_least, 1.0)
        judgment.ask(f"parameters to as configured, {CHECKPOINTED}, {tokens}", words[CHECKPOINTED], "x")
        more = {}
        for way in (PLANNED, CHECKPOINTED):
            each = [samples[f"{FLOPS}{one}, {tokens}"][0] for one in (way, CONFIGURED)]
            more[way] = 100 * (each[0] / each[1] - 1)
            judgment.ask(f"more FLOPs, {way}, {tokens}", exact(more[way]), "%")
        judgment.said.append(
            f"in batches of {tokens} the planned step trains {words[PLANNED].mean:.1f}x the parameters for "
            f"{more[PLANNED]:.0f}% more FLOPs, {CHECKPOINTED} {words[CHECKPOINTED].mean:.1f}x for "
            f"{more[CHECKPOINTED]:.0f}% more"
        )
    names: Mapping[str, str] = {
        f"{noun}, {way}, {tokens}": f"{what}{way}, {tokens}"
        for noun, what in (("layers", FITS), ("parameters", PARAMETERS))
        for tokens in batches
        for way in WAYS
    }
    judgment.show(samples, names)
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="In the same memory a planned step (recomputation, and updates in backward) trains a model three times "
    "as large.",
    source="the figures that this project set out to test, which name no source of their own; method: Chen et al. 2016 "
    "(arXiv:1604.06174), Lv et al. 2023 (arXiv:2306.09782)",
    published="models 3x as large",
    compared="the deepest model of one width whose steps stay below a limit of memory in training's heap: plain AdamW "
    "in FP32, checkpointing alone (units of one layer, which everybody has), and the planner's leanest step, which may "
    "compute every block again (about a third more FLOPs, counted) and updates in backward; at a batch where "
    "activations dominate and at one where states do",
    target=f"where activations dominate, at least {TARGET:g}x the parameters of the step as configured, and no fewer "
    "than by checkpointing alone (lower bounds)",
    headline=[
        f"parameters to as configured, {way}, {rows * FULL.seq_len} tokens"
        for rows in FULL.rows
        for way in (PLANNED, CHECKPOINTED)
    ],
)
