"""Claim: integer inference on a CPU is several times as fast as eager FP32 and changes predictions hardly at all."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from modelwright.compress.int8 import Agreement
from modelwright.core.resources import versions as versions_of
from modelwright.ops import cpu_kernels
from modelwright.recipes.load import recipe
from modelwright_claims import workbench
from modelwright_claims.claim import Claim, Conditions, Figure, Measurement, Samples, Setting, Verdict
from modelwright_claims.inference_arms import (
    ARMS,
    EAGER,
    EIGHT_BIT_RIVALS,
    FOUR_BIT_RIVALS,
    FP32,
    INT4,
    INT4_CODES,
    INT8,
    PEERS_PYTHON,
    decoding,
    paces,
    prefill,
    running,
    write_models,
)
from modelwright_claims.integer_quality import (
    GPTQ,
    MORE_RATE,
    NEAREST,
    SERVED,
    TORCHAO,
    TRAINED,
    VARIANTS,
    measure_quality,
)
from modelwright_claims.judging import Judgment, Lacks
from modelwright_claims.statistics import Estimate, differences, estimate, exact, ratios

SPEED_TARGET = 3.1
"""INT8 over eager FP32 at 8 streams, as published."""
OWN_TARGET = 2.0
"""INT8 over our own FP32 engine at one stream."""
RIVAL_TARGET = 0.9
"""Share of the speed of the fastest other engine with weights of as many bits."""
ACCURACY_TARGET = 0.8
"""Percent of the accuracy that INT8 may lose, as published."""
SIZE_TARGET = 2.4
STREAMS = (1, 8, 32)
PROMPT = 256
CASES = (*(decoding(count) for count in STREAMS), prefill(PROMPT))
NUM_ROUNDS = 7
NUM_STEPS = 24
"""Timed tokens of each stream in a round."""
NUM_SEEDS = 5
LOSS, ACCURACY, BYTES = "held-out loss, ", "accuracy, ", "bytes on disk, "
ORIGINAL = "FP32"
BESIDE = ("largest logit difference", "divergence", "likeliest token the same")


def measure(setting: Setting) -> Measurement:
    """Quality on models that are trained here; speed and size at the quickstart's shape, where they are its own."""
    size, threads = workbench.size(setting), torch.get_num_threads()
    quality = measure_quality(setting, size, 1 if setting.quick else NUM_SEEDS)
    shape = recipe("quickstart").model
    num_rounds, num_steps = (2, 6) if setting.quick else (NUM_ROUNDS, NUM_STEPS)
    with tempfile.TemporaryDirectory(dir=setting.folder) as place:
        _, num_bytes = write_models(shape, Path(place))
        with running(ARMS, Path(place), threads) as (processes, missing):
            versions = {name: process.version for name, process in processes.items()}
            rounds = []
            for turn in range(-1, num_rounds):  # the first warms up
                setting.progress.note(f"int8: round {turn + 1} of {num_rounds}, {len(processes)} engines in turn")
                rounds.append(paces(processes, STREAMS, prompt=PROMPT, num_steps=num_steps, turn=turn))
    conditions: dict[str, str | int | float | bool] = {
        "speed and size": f"{shape.num_parameters} parameters, width {shape.model_dim}, drawn weights",
        "threads of each engine": threads,
        "instruction set": cpu_kernels.instruction_set(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **{f"version of {name}": version for name, version in versions.items()},
        **{f"not at hand: {name}": why for name, why in missing.items()},
        **{f"quality: {key}": value for key, value in size.describe().items()},
        "quality: more steps": f"{size.num_steps // 2}, at {MORE_RATE:g} of the rate",
        "quality: 4 bits": f"activations per token, embedding and head as they are; {SERVED} has all in INT8",
        "quality: torchao": versions_of("torchao")["torchao"] if TORCHAO in quality[0] else "not at hand",
    }
    return measurement(quality, rounds[1:], num_bytes, conditions)


def measurement(
    quality: Sequence[Mapping[str, Agreement]],
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
    num_bytes: Mapping[str, int],
    conditions: Conditions,
) -> Measurement:
    """Return speeds, sizes and what the models say of the same text. quality: of each seed, by variant; rounds: tokens
    per second by case and engine.
    """
    samples: dict[str, list[float]] = {}
    for case in rounds[0]:
        for name in rounds[0][case]:
            samples[f"{case}, {name}"] = [one[case][name] for one in rounds]
    samples |= {f"{BYTES}{name}": [float(of)] for name, of in num_bytes.items()}
    first = next(iter(quality[0]))
    samples[f"{LOSS}{ORIGINAL}"] = [one[first].reference_loss for one in quality]
    samples[f"{ACCURACY}{ORIGINAL}"] = [one[first].reference_accuracy for one in quality]
    for name in quality[0]:
        samples[f"{LOSS}{name}"] = [one[name].int8_loss for one in quality]
        samples[f"{ACCURACY}{name}"] = [one[name].int8_accuracy for one in quality]
    served = [one[SERVED] for one in quality]
    samples["largest logit difference"] = [one.max_logit_gap for one in served]
    samples["divergence"] = [one.divergence for one in served]
    samples["likeliest token the same"] = [one.same_first for one in served]
    return Measurement(samples=samples, conditions={**conditions, "held-out tokens": served[0].num_tokens})


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when INT8 is as fast as published at 8 streams, against our own engine at one, within a tenth of the best
    other engine everywhere in decoding, and loses as little accuracy as published; and when training on the grid loses
    less than any rounding after training at 4 bits.
    """
    judgment = Judgment()
    with judgment.part():
        _at_least(judgment, samples, decoding(8), INT8, EAGER, SPEED_TARGET)
    with judgment.part():
        _at_least(judgment, samples, decoding(1), INT8, FP32, OWN_TARGET)
    for count in STREAMS:
        with judgment.part():
            _beside_rivals(judgment, samples, decoding(count), (INT8,), tuple(EIGHT_BIT_RIVALS))
        with judgment.part():
            _beside_rivals(judgment, samples, decoding(count), (INT4, INT4_CODES), tuple(FOUR_BIT_RIVALS))
    _judge_quality(judgment, samples)
    with judgment.part():
        fp32, int8, int4 = (samples[f"{BYTES}{name}"][0] for name in ("fp32", "int8", "int4"))
        judgment.figures["size ratio"] = Figure(value=fp32 / int8, unit="x")
        judgment.figures["size ratio, INT4"] = Figure(value=fp32 / int4, unit="x")
        judgment.said.append(f"{fp32 / int8:.2f}x smaller")
        judgment.at_least("size", exact(fp32 / int8), SIZE_TARGET, "x")
    for case in CASES:
        for name in ARMS:
            with judgment.beside():
                judgment.figures[f"{case}, {name}"] = estimate(samples[f"{case}, {name}"]).figure("tokens/s")
    missing = [name for name in ARMS if f"not at hand: {name}" in conditions]
    if missing:
        judgment.said.append(f"not at hand: {', '.join(missing)}")
    return judgment.verdict()


def _at_least(judgment: Judgment, samples: Samples, case: str, name: str, other: str, limit: float) -> None:
    ratio = ratios(samples[f"{case}, {name}"], samples[f"{case}, {other}"])
    judgment.figures[f"{name} over {other}, {case}"] = ratio.figure("x")
    judgment.said.append(f"{name} is {ratio.mean:.2f}x {other} in {case}")
    judgment.at_least(f"{name} over {other} in {case}", ratio, limit, "x")


def _fastest(samples: Samples, case: str, names: Sequence[str]) -> str:
    """The name of the fastest of those that were measured. Raises `Lacks` if none was."""
    means = {name: estimate(samples[f"{case}, {name}"]).mean for name in names if f"{case}, {name}" in samples}
    if not means:
        raise Lacks(f"another engine in {case}: none of {', '.join(names)} was at hand (see {PEERS_PYTHON})")
    return max(means, key=lambda name: means[name])


def _beside_rivals(judgment: Judgment, samples: Samples, case: str, own: Sequence[str], rivals: Sequence[str]) -> None:
    _at_least(judgment, samples, case, _fastest(samples, case, own), _fastest(samples, case, rivals), RIVAL_TARGET)


def _judge_quality(judgment: Judgment, samples: Samples) -> None:
    with judgment.part():
        lost = _lost(samples, SERVED)
        judgment.said.append(f"INT8 as served loses {lost.mean:.2f}% of the accuracy")
        judgment.at_most("accuracy that INT8 loses", lost, ACCURACY_TARGET, "%")
    for name in VARIANTS:
        with judgment.beside():
            judgment.figures[f"accuracy lost, {name}"] = _lost(samples, name).figure("%")
            gap = differences(samples[f"{LOSS}{name}"], samples[f"{LOSS}{ORIGINAL}"])
            judgment.figures[f"held-out loss above FP32, {name}"] = gap.figure("nats")
    with judgment.part():
        trained = TRAINED["4 bits"]
        for rounding in (NEAREST, GPTQ):
            gain = differences(samples[f"{LOSS}{rounding}"], samples[f"{LOSS}{trained}"])
            judgment.figures[f"held-out loss below that of {rounding}, {trained}"] = gain.figure("nats")
            judgment.said.append(f"{trained}: {-gain.mean:+.4f} nats beside {rounding}")
            judgment.above(f"what training on the grid gains over {rounding}", gain, 0.0, " nats")
    for name in BESIDE:
        with judgment.beside():
            judgment.figures[name] = estimate(samples[name]).figure("")


def _lost(samples: Samples, name: str) -> Estimate:
    """Percent of the accuracy."""
    pairs = zip(samples[f"{ACCURACY}{name}"], samples[f"{ACCURACY}{ORIGINAL}"], strict=True)
    return estimate([100 * (1 - one / before) for one, before in pairs])


CLAIM = Claim(
    name="int8",
    statement="INT8 inference on a CPU is several times as fast as eager FP32 and keeps nearly all of its accuracy.",
    source="published guides to quantization-aware training; PyTorch, Dynamic Quantization on BERT, 2019-2025 "
    "(https://docs.pytorch.org/tutorials/intermediate/dynamic_quantization_bert_tutorial.html)",
    published="3.1x faster than FP32 with less than 0.8% loss of accuracy; BERT base on MRPC, one thread: 438 -> "
    "181 MB (2.4x), 160 -> 90 s (1.8x), 0.6% lower F1",
    compared="the same weights, at the quickstart's shape, in eager PyTorch, our engine in FP32, INT8 and INT4, and "
    "other programs' engines with 8 and 4 bits: steps of the engines as they serve, each in a process of its own with "
    "as many threads, in turn; accuracy on models trained here, rounded after training and trained on the grid at "
    "equal tokens",
    target=f"INT8 decodes {SPEED_TARGET}x as fast as eager FP32 with 8 streams and {OWN_TARGET:g}x as fast as our "
    f"FP32 engine with one; with 1, 8 and 32 streams INT8 and INT4 reach {RIVAL_TARGET:.0%} of the fastest other "
    f"engine of as many bits; INT8 loses at most {ACCURACY_TARGET}% of the accuracy and is {SIZE_TARGET}x smaller; at "
    "4 bits training on the grid ends with a lower loss than rounding after training",
    measure=measure,
    judge=judge,
)
