"""Well-known model sizes and accelerators by name, for plans without a recipe or a machine.

The share of an accelerator's peak rate that training reaches is taken from published runs. Utilization is counted as in
`ModelConfig.flops_per_token`: attention to earlier positions only, no recomputation; publications that count attention
to all positions state higher figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.pipeline.estimate.layout import ComputeFormat


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Compute rate of a device in a format. peak_flops_per_s: rate of dense products, from the data sheet or measured;
    efficiency: share of it that a training step reaches if no rank waits for another; source: source of that share.
    """

    peak_flops_per_s: float
    efficiency: float
    source: str

    def __post_init__(self) -> None:
        if self.peak_flops_per_s <= 0:
            raise ConfigError(f"flops: must be above 0, got {self.peak_flops_per_s}")
        if not 0.0 < self.efficiency <= 1.0:
            raise ConfigError(
                f"efficiency: must be above 0 and at most 1, got {self.efficiency}; 0.4 is 40% of the peak"
            )


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator as specified by its maker, per device and direction. rates: compute rate by format of products;
    host_bytes_per_s: rate to the other devices in the host; network_bytes_per_s: rate to other hosts.
    """

    memory_bytes: float
    rates: Mapping[ComputeFormat, ComputeRate]
    host_bytes_per_s: float
    network_bytes_per_s: float

    def rate(self, wanted: ComputeFormat, *, name: str) -> ComputeRate:
        """Returns the rate in a format. Raises `ConfigError`, with `name` for the device, if it does not support it."""
        if wanted not in self.rates:
            others = ", ".join(self.rates)
            raise ConfigError(f"--compute: {name} does not support {wanted.upper()}; it supports {others}")
        return self.rates[wanted]


_ASSUMED = "assumed, as no published training run in this format is known"

DEVICES: dict[str, Device] = {
    # NVIDIA H100 SXM data sheet: 80 GB; dense 67 TFLOP/s FP32, 495 TF32, 989 BF16 and FP16, 1,979 FP8; NVLink 900 GB/s
    # both ways; 400 Gbit/s InfiniBand.
    "h100": Device(
        memory_bytes=80e9,
        rates={
            "fp32": ComputeRate(peak_flops_per_s=67e12, efficiency=0.6, source=_ASSUMED),
            "tf32": ComputeRate(peak_flops_per_s=495e12, efficiency=0.4, source=_ASSUMED),
            # Higher ones are published too: about 50% for nanochat on 8 H100, 41 to 48% for Megatron-LM on many.
            "bf16": ComputeRate(
                peak_flops_per_s=989e12,
                efficiency=0.32,
                source="torchtitan (Liang et al. 2024): Llama 3.1 8B with FSDP on 8 H100, 5,762 tokens/s each (30%), "
                "6,667 with torch.compile (35%)",
            ),
            "fp16": ComputeRate(peak_flops_per_s=989e12, efficiency=0.32, source="as BF16, which is as fast"),
            # DeepSeek-V3 reaches 17%: 37 billion active parameters, 1,543 tokens/s on each H800.
            "fp8": ComputeRate(
                peak_flops_per_s=1979e12,
                efficiency=0.22,
                source="torchtitan (Liang et al. 2024): Llama 3.1 8B with FSDP, torch.compile and FP8 on 8 H100, 8,532 "
                "tokens/s on each",
            ),
        },
        host_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    ),
    # NVIDIA A100 SXM data sheet: 80 GB; dense 19.5 TFLOP/s FP32, 156 TF32, 312 BF16 and FP16; NVLink 600 GB/s both
    # ways; 200 Gbit/s InfiniBand.
    "a100": Device(
        memory_bytes=80e9,
        rates={
            "fp32": ComputeRate(peak_flops_per_s=19.5e12, efficiency=0.6, source=_ASSUMED),
            "tf32": ComputeRate(peak_flops_per_s=156e12, efficiency=0.5, source=_ASSUMED),
            "bf16": ComputeRate(
                peak_flops_per_s=312e12,
                efficiency=0.47,
                source="LLaMA (Touvron et al. 2023): 3,370 tokens/s (7B, 45%) and 380 (65B, 48%) on each of 2,048 A100",
            ),
            "fp16": ComputeRate(peak_flops_per_s=312e12, efficiency=0.47, source="as BF16, which is as fast"),
        },
        host_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
    ),
    # NVIDIA V100 SXM3 data sheet: 32 GB; 15.7 TFLOP/s FP32, 125 FP16 (it has no BF16); NVLink 300 GB/s both ways;
    # 100 Gbit/s.
    "v100": Device(
        memory_bytes=32e9,
        rates={
            "fp32": ComputeRate(peak_flops_per_s=15.7e12, efficiency=0.6, source=_ASSUMED),
            "fp16": ComputeRate(
                peak_flops_per_s=125e12,
                efficiency=0.31,
                source="Megatron-LM (Shoeybi et al. 2019): 1.2 billion parameters on one V100, 39 TFLOP/s",
            ),
        },
        host_bytes_per_s=150e9,
        network_bytes_per_s=12.5e9,
    ),
}

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
    # Grattafiori et al. 2024, table 3: 32 layers of width 4,096, 8 key/value heads, feed-forward 14,336, vocabulary
    # 128,256; trained on rows of 8,192 tokens before the context was made longer.
    "llama3.1-8b": ModelConfig(
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
    ),
}
