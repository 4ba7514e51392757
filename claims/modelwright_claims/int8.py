"""Claim: dynamic INT8 linears make a model smaller and faster and change its predictions hardly at all."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_model

from modelwright.compress.compare import Agreement, SpeedPair, measure_agreement, measure_speed
from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.core.seeds import derive_seed
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.recipes.load import recipe
from modelwright_claims import workbench
from modelwright_claims.claim import Claim, Conditions, Figure, Measurement, Samples, Setting, Verdict
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import exact, ratios
from modelwright_claims.training_run import Run, execute

SIZE_TARGET = 2.4
SPEED_TARGET = 1.5
LOSS_TARGET = 0.01
SHAPES = {
    "decode, 1 stream": (1, 1),
    "decode, 8 streams": (8, 1),
    "decode, 256 streams": (256, 1),
    "prefill, 256 tokens": (1, 256),
}
"""Streams, and tokens of each. Samples of their speeds are FP32's and INT8's in turn, a pair a round."""
NUM_ROUNDS = 5
LOSS, BYTES = "held-out loss, ", "bytes on disk, "
FORMATS = ("FP32", "INT8")
EMBEDDING = "weights of the embedding"


def measure(setting: Setting) -> Measurement:
    """Quality on a model that was trained here; size and speed at the quickstart's shape, where they are its own."""
    size = workbench.size(setting)
    text = workbench.prepare_text(setting)
    trained = Decoder(size.model_config(text.vocab_size))
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        weights = Path(folder) / "trained.safetensors"
        execute(setting, Run(size=size), keep=weights)
        load_model(trained, weights)
    heldout = workbench.packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="test")
    tokens_BT = next(heldout.batches(16 if setting.quick else 64)).input_ids_BT
    agreement = measure_agreement(trained, quantize_model(trained, Int8WeightsConfig()), tokens_BT)
    reference = Decoder(recipe("quickstart").model)
    reference.init_weights(derive_seed(0, "weights"))
    quantized = quantize_model(reference, Int8WeightsConfig())
    repeats = 5 if setting.quick else 15
    speed: dict[str, list[SpeedPair]] = {name: [] for name in SHAPES}
    for _ in range(2 if setting.quick else NUM_ROUNDS):
        for name, (streams, length) in SHAPES.items():
            speed[name].append(
                measure_speed(reference, quantized, num_streams=streams, num_tokens=length, repeats=repeats)
            )
    return measurement(agreement, speed, _bytes_on_disk(setting, reference, quantized), reference.config, size)


def _bytes_on_disk(setting: Setting, reference: Decoder, quantized: Decoder) -> tuple[int, int]:
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        save_model(reference, Path(folder) / "fp32")
        save_int8(quantized, Path(folder) / "int8")
        fp32, int8 = ((Path(folder) / kind / "model.safetensors").stat().st_size for kind in ("fp32", "int8"))
    return fp32, int8


def measurement(
    agreement: Agreement,
    speed: Mapping[str, Sequence[SpeedPair]],
    num_bytes: tuple[int, int],
    shape: ModelConfig,
    size: workbench.Size,
) -> Measurement:
    """Return speeds, sizes and what the two models say of the same text."""
    losses = (agreement.reference_loss, agreement.int8_loss)
    return Measurement(
        samples={
            **{
                name: [pace for pair in pairs for pace in (pair.reference_tokens_per_s, pair.int8_tokens_per_s)]
                for name, pairs in speed.items()
            },
            **{f"{BYTES}{name}": [float(of)] for name, of in zip(FORMATS, num_bytes, strict=True)},
            **{f"{LOSS}{name}": [of] for name, of in zip(FORMATS, losses, strict=True)},
            "likeliest token the same": [agreement.same_first],
            "largest logit difference": [agreement.max_logit_gap],
            "divergence": [agreement.divergence],
        },
        conditions={
            "speed and size": f"{shape.num_parameters} parameters, width {shape.model_dim}",
            EMBEDDING: shape.vocab_size * shape.model_dim,
            "rows of the embedding": shape.vocab_size,
            **{f"quality: {key}": value for key, value in size.describe().items()},
            "held-out tokens": agreement.num_tokens,
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when smaller by `SIZE_TARGET`, faster by `SPEED_TARGET` in decoding and in prefill, and as good.

    The loss is one number on one text: the two models are deterministic, and the difference is exact for that text.
    """
    judgment = Judgment()
    for name in SHAPES:
        with judgment.part():
            paces = samples[name]
            ratio = ratios(paces[1::2], paces[0::2])
            judgment.figures[f"speed-up, {name}"] = ratio.figure("x")
            judgment.said.append(f"{ratio.mean:.2f}x in {name}")
            judgment.at_least(f"speed in {name}", ratio, SPEED_TARGET, "x")
    with judgment.part():
        fp32, int8 = (samples[f"{BYTES}{name}"][0] for name in FORMATS)
        judgment.figures["size ratio"] = Figure(value=fp32 / int8, unit="x")
        judgment.figures |= {
            f"{name} weights": Figure(value=of / 2**20, unit="MiB")
            for name, of in zip(FORMATS, (fp32, int8), strict=True)
        }
        table, rows = int(conditions[EMBEDDING]), int(conditions["rows of the embedding"])
        as_published = fp32 / (int8 + 4 * table - (table + 4 * rows))  # a byte each and a scale a row
        judgment.figures["size ratio with the embedding in FP32"] = Figure(value=as_published, unit="x")
        judgment.said.append(f"{fp32 / int8:.2f}x smaller ({as_published:.2f}x with the embedding in FP32)")
        judgment.at_least("size", exact(fp32 / int8), SIZE_TARGET, "x")
    with judgment.part():
        gap = samples[f"{LOSS}INT8"][0] - samples[f"{LOSS}FP32"][0]
        judgment.figures["loss gap"] = Figure(value=gap, unit="nats")
        judgment.said.append(f"held-out loss {gap:+.4f} nats")
        judgment.at_most("held-out loss above FP32", exact(gap), LOSS_TARGET, " nats")
    with judgment.beside():
        same = 100 * samples["likeliest token the same"][0]
        judgment.figures["likeliest token the same"] = Figure(value=same, unit="%")
        judgment.said.append(f"{same:.1f}% of likeliest tokens the same")
        for name, unit in (("largest logit difference", ""), ("divergence", "nats")):
            judgment.figures[name] = Figure(value=samples[name][0], unit=unit)
    return judgment.verdict()


CLAIM = Claim(
    name="int8",
    statement="Dynamic per-channel INT8 of the linear layers makes a model smaller and faster on a CPU at nearly the "
    "same quality.",
    source="PyTorch, Dynamic Quantization on BERT, 2019-2025 "
    "(https://docs.pytorch.org/tutorials/intermediate/dynamic_quantization_bert_tutorial.html)",
    published="BERT base on MRPC, one thread: 438 -> 181 MB (2.4x), 160 -> 90 s (1.8x), 0.6% lower F1",
    compared="the same weights in FP32 and INT8 (activations quantised per token at run time), alternated; quality on "
    "a model trained here, size and speed at the shape of the quickstart recipe",
    target=f"{SIZE_TARGET}x smaller, {SPEED_TARGET}x faster at decode and prefill, at most {LOSS_TARGET} nats of "
    "held-out loss",
    measure=measure,
    judge=judge,
)
