"""Claim: dynamic INT8 linears make a model smaller and faster and change its predictions hardly at all."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_model

from modelwright.compress.compare import Agreement, SpeedPair, measure_agreement, measure_speed
from modelwright.compress.int8 import Int8Config, quantize_model, save_int8
from modelwright.core.seeds import derive_seed
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.recipes.quickstart import quickstart
from modelwright_claims import workbench
from modelwright_claims.claim import Claim, Figure, Result, Setting
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
"""Streams, and tokens of each."""


def measure(setting: Setting) -> Result:
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
    agreement = measure_agreement(trained, quantize_model(trained, Int8Config()), tokens_BT)
    reference = Decoder(quickstart().model)
    reference.init_weights(derive_seed(0, "weights"))
    quantized = quantize_model(reference, Int8Config())
    repeats = 5 if setting.quick else 15
    speed = {
        name: measure_speed(reference, quantized, num_streams=streams, num_tokens=length, repeats=repeats)
        for name, (streams, length) in SHAPES.items()
    }
    return judge(agreement, speed, _bytes_on_disk(setting, reference, quantized), reference.config, size)


def _bytes_on_disk(setting: Setting, reference: Decoder, quantized: Decoder) -> tuple[int, int]:
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        save_model(reference, Path(folder) / "fp32")
        save_int8(quantized, Path(folder) / "int8")
        fp32, int8 = ((Path(folder) / kind / "model.safetensors").stat().st_size for kind in ("fp32", "int8"))
    return fp32, int8


def judge(
    agreement: Agreement,
    speed: dict[str, SpeedPair],
    num_bytes: tuple[int, int],
    shape: ModelConfig,
    size: workbench.Size,
) -> Result:
    """Met when smaller by `SIZE_TARGET`, faster by `SPEED_TARGET` in decoding and in prefill, and as good."""
    smaller = num_bytes[0] / num_bytes[1]
    table = shape.vocab_size * shape.model_dim  # weights of the embedding, a byte each and a scale a row
    as_published = num_bytes[0] / (num_bytes[1] + 4 * table - (table + 4 * shape.vocab_size))
    gap = agreement.int8_loss - agreement.reference_loss
    missed = [f"size short by {SIZE_TARGET - smaller:.2f}x"] if smaller < SIZE_TARGET else []
    missed += [
        f"{name} short by {SPEED_TARGET - pair.ratio:.2f}x" for name, pair in speed.items() if pair.ratio < SPEED_TARGET
    ]
    missed += [f"loss worse by {gap:.4f} nats"] if gap > LOSS_TARGET else []
    ratios = ", ".join(f"{pair.ratio:.2f}x in {name}" for name, pair in speed.items())
    reason = f"{smaller:.2f}x smaller ({as_published:.2f}x with the embedding in FP32); speed {ratios}; "
    reason += f"held-out loss {gap:+.4f} nats; {100 * agreement.same_first:.1f}% of likeliest tokens the same"
    return Result(
        kind="short" if missed else "met",
        reason=f"{', '.join(missed)}: {reason}" if missed else reason,
        figures={
            "size ratio": Figure(value=smaller, unit="x"),
            "size ratio with the embedding in FP32": Figure(value=as_published, unit="x"),
            "loss gap": Figure(value=gap, unit="nats"),
            **{f"speed-up, {name}": Figure(value=pair.ratio, unit="x") for name, pair in speed.items()},
            "likeliest token the same": Figure(value=100 * agreement.same_first, unit="%"),
            "largest logit difference": Figure(value=agreement.max_logit_gap, unit=""),
            "divergence": Figure(value=agreement.divergence, unit="nats"),
            "FP32 weights": Figure(value=num_bytes[0] / 2**20, unit="MiB"),
            "INT8 weights": Figure(value=num_bytes[1] / 2**20, unit="MiB"),
        },
        conditions={
            "speed and size": f"{shape.num_parameters} parameters, width {shape.model_dim}",
            **{f"quality: {key}": value for key, value in size.describe().items()},
            "held-out tokens": agreement.num_tokens,
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        samples={name: [pair.reference_tokens_per_s, pair.int8_tokens_per_s] for name, pair in speed.items()},
    )


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
)
