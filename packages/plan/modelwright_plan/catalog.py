"""Well-known model sizes and accelerators by name, for plans without a recipe or a machine.

The shares of an accelerator's rates that training reaches are fitted on published runs (`published_runs.yaml`, rows
with `use: fit`). Utilization is counted as in `ModelConfig.flops_per_token`: attention to earlier positions only, no
recomputation; publications that count attention to all positions state higher figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelwright.core.config import ConfigError
from modelwright.model.decoder import ModelConfig
from modelwright.pipeline.estimate.layout import ComputeFormat
from modelwright_plan.step_time import ComputeRate


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator as specified by its maker, per device and direction, and the shares that training reaches.

    memory_bytes_per_s: rate of its memory; peaks: rate of dense products by format; host_bytes_per_s: rate to the other
    devices in the host; network_bytes_per_s: rate to other hosts. products, attention: shares of the peak that large
    products and fused attention reach; memory: share of the memory's rate that other kernels reach; source: where the
    shares come from.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    peaks: Mapping[ComputeFormat, float]
    host_bytes_per_s: float
    network_bytes_per_s: float
    products: float
    attention: float
    memory: float
    source: str

    def rate(self, wanted: ComputeFormat, *, name: str) -> ComputeRate:
        """Returns the rate in a format. Raises `ConfigError`, with `name` for the device, if it does not support it."""
        if wanted not in self.peaks:
            others = ", ".join(self.peaks)
            raise ConfigError(f"--compute: {name} does not support {wanted.upper()}; it supports {others}")
        peak = self.peaks[wanted]
        # Attention is computed in 16 bits where products have 8.
        attention = self.attention * (self.peaks["bf16"] / peak if wanted == "fp8" else 1.0)
        fitted = "" if wanted in ("bf16", "fp16") else f"; fitted in 16 bits and assumed for {wanted.upper()}"
        return ComputeRate(
            peak_flops_per_s=peak,
            product_share=self.products,
            attention_share=attention,
            memory_s_per_byte=1.0 / (self.memory * self.memory_bytes_per_s),
            cast_bytes=FP8_CAST_BYTES if wanted == "fp8" else 0.0,
            source=self.source + fitted,
        )


FP8_CAST_BYTES = 5.0
"""Bytes moved for each element of an operand in FP8: read in 16 bits for its largest value and again to be cast, then
written."""
_FITTED = "fitted on 4 published runs (`modelwright plan published` shows them and the others)"

DEVICES: dict[str, Device] = {
    # NVIDIA H100 SXM data sheet: 80 GB at 3.35 TB/s; dense 67 TFLOP/s FP32, 495 TF32, 989 BF16 and FP16, 1,979 FP8;
    # NVLink 900 GB/s both ways; 400 Gbit/s InfiniBand.
    "h100": Device(
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        peaks={"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
        host_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        products=0.634,
        attention=0.214,
        memory=0.675,
        source=_FITTED,
    ),
    # NVIDIA A100 SXM data sheet: 80 GB at 2.039 TB/s; dense 19.5 TFLOP/s FP32, 156 TF32, 312 BF16 and FP16; NVLink
    # 600 GB/s both ways; 200 Gbit/s InfiniBand.
    "a100": Device(
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        peaks={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
        host_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        products=0.741,
        attention=0.295,
        memory=0.9,
        source=_FITTED,
    ),
    # NVIDIA V100 SXM3 data sheet: 32 GB at 0.9 TB/s; 15.7 TFLOP/s FP32, 125 FP16 (it has no BF16); NVLink 300 GB/s both
    # ways; 100 Gbit/s. Too few runs with a known layout are published to fit its shares.
    "v100": Device(
        memory_bytes=32e9,
        memory_bytes_per_s=0.9e12,
        peaks={"fp32": 15.7e12, "fp16": 125e12},
        host_bytes_per_s=150e9,
        network_bytes_per_s=12.5e9,
        products=0.741,
        attention=0.295,
        memory=0.9,
        source="those of the A100, assumed: no runs with a known layout were fitted",
    ),
}

# Grattafiori et al. 2024, table 3: 32 layers of width 4,096, 8 key/value heads, feed-forward 14,336, vocabulary
# 128,256; trained on rows of 8,192 tokens before the context was made longer.
_LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    num_layers=32,
    model_dim=4_096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=14_336,
    max_seq_len=8_192,
    rope_theta=500_000.0,
    qk_norm=False,
    tie_embeddings=False,
)

MODELS: dict[str, ModelConfig] = {
    # Brown et al. 2020, table 2.1: 96 layers of width 12,288, 96 heads of 128, context 2,048, vocabulary 50,257 (here
    # a multiple of 128). Our feed-forward has three matrices, so 8/3 of the width takes as many parameters as two of 4.
    "gpt3-175b": ModelConfig(
        vocab_size=50_304,
        num_layers=96,
        model_dim=12_288,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        ffn_dim=32_768,
        max_seq_len=2_048,
        qk_norm=False,
    ),
    # Touvron et al. 2023: 32 layers of width 4,096, feed-forward 11,008, vocabulary 32,000, context 4,096.
    "llama2-7b": ModelConfig(
        vocab_size=32_000,
        num_layers=32,
        model_dim=4_096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_dim=11_008,
        max_seq_len=4_096,
        qk_norm=False,
        tie_embeddings=False,
    ),
    "llama3.1-8b": _LLAMA_8B,
    "llama3.1-70b": replace(_LLAMA_8B, num_layers=80, model_dim=8_192, num_heads=64, ffn_dim=28_672),
    "llama3.1-405b": replace(_LLAMA_8B, num_layers=126, model_dim=16_384, num_heads=128, ffn_dim=53_248),
}
