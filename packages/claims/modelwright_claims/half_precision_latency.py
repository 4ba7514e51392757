"""Claim: inference with FP16 weights takes a third less time than with FP32; one engine for each format, alternated."""

import time
from contextlib import nullcontext, suppress
from itertools import pairwise

import torch

from modelwright.compress.int8 import Int8WeightsConfig, quantize_model
from modelwright.core.config import ConfigError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.train.precision.apply import fp32_products
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.memory_probe import probe_model
from modelwright_claims.statistics import percent_saved

TARGET, PROMPT_LEN, NUM_STEPS = 37.0, 256, 8
FP32, ONEDNN, BF16, FP16, INT8 = "FP32", "FP32 by oneDNN", "BF16", "FP16", "INT8"
PROMPT, STEP = "a prompt", "a decode step"
SECONDS = "seconds, "


def measure(setting: Setting) -> Measurement:
    layers, width = (1, 128) if setting.quick else (12, 768)
    shape = probe_model(model_dim=width, num_layers=layers, vocab_size=8192, seq_len=512, head_dim=64)

    def drawn(dtype: torch.dtype = torch.float32) -> Decoder:
        model = Decoder(shape)
        model.init_weights(0)
        return model.to(dtype)

    models = {FP32: drawn(), BF16: drawn(torch.bfloat16), FP16: drawn(torch.float16)}
    models[INT8] = quantize_model(models[FP32], Int8WeightsConfig())
    with suppress(ConfigError), fp32_products(onednn=True):  # raises where oneDNN is missing or rounds
        models[ONEDNN] = models[FP32]
    config = EngineConfig(max_num_seqs=1, kv_cache_tokens=512, enable_prefix_caching=False)
    engines = {name: Engine(model, config) for name, model in models.items()}
    samples: dict[str, list[float]] = {}
    for number in range(2 if setting.quick else 11):
        setting.progress.note(f"half_precision_latency: round {number}")
        for name, engine in engines.items():
            with fp32_products(onednn=True) if name == ONEDNN else nullcontext():
                seconds = request(engine)
            for what, value in seconds.items() if number else ():  # the first round makes buffers
                samples.setdefault(f"{SECONDS}{name}, {what}", []).append(value)
    facts = {"parameters": shape.num_parameters, "threads": torch.get_num_threads(), **described(__name__)}
    return Measurement(samples=samples, conditions=facts)


def request(engine: Engine) -> dict[str, float]:
    """Seconds of one prompt, up to its first token, and the shortest of the steps after it."""
    prompt = [3 + 7 * place % 251 for place in range(PROMPT_LEN)]
    engine.add("one", prompt, SamplingParams(max_tokens=2 * NUM_STEPS, temperature=0.0))
    times = [time.perf_counter()]
    for _ in range(1 + NUM_STEPS):
        while not engine.step():
            pass
        times.append(time.perf_counter())
    engine.abort("one")
    return {PROMPT: times[1] - times[0], STEP: min(b - a for a, b in pairwise(times[1:]))}


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for what in (PROMPT, STEP):
        arms = [f"{SECONDS}{name}, {what}" for name in (FP32, ONEDNN)]
        fp32 = [min(times) for times in zip(*(samples[arm] for arm in arms if arm in samples), strict=True)]
        for name in (FP16, BF16, INT8):
            saved = percent_saved(samples[f"{SECONDS}{name}, {what}"], fp32)
            relation, say = (">=" if name == FP16 else ""), f"{what} takes {{0.mean:.0f}}% less time in {name}"
            judgment.ask(f"less latency, {name}, {what}", saved, "%", relation, TARGET, say=say)
    judgment.show(samples, {name.replace(SECONDS, "latency, "): name for name in samples}, "ms", 1000.0)
    return judgment.verdict()


CLAIM = declared(__name__)
