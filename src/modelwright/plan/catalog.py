"""Well-known model sizes and accelerators by name, for plans without a recipe or a machine."""

from dataclasses import dataclass

from modelwright.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator as its maker describes it, per device and direction.

    flops_per_s: dense BF16 products; host_bytes_per_s: to the others in the host; network_bytes_per_s: to other hosts.
    """

    memory_bytes: float
    flops_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float


DEVICES: dict[str, Device] = {
    # NVIDIA H100 SXM data sheet: 80 GB, 989 TFLOP/s dense BF16, NVLink 900 GB/s both ways; 400 Gbit/s InfiniBand.
    "h100": Device(memory_bytes=80e9, flops_per_s=989e12, host_bytes_per_s=450e9, network_bytes_per_s=50e9),
    # NVIDIA A100 SXM data sheet: 80 GB, 312 TFLOP/s dense BF16, NVLink 600 GB/s both ways; 200 Gbit/s InfiniBand.
    "a100": Device(memory_bytes=80e9, flops_per_s=312e12, host_bytes_per_s=300e9, network_bytes_per_s=25e9),
    # NVIDIA V100 SXM3 data sheet: 32 GB, 125 TFLOP/s FP16 (it has no BF16), NVLink 300 GB/s both ways; 100 Gbit/s.
    "v100": Device(memory_bytes=32e9, flops_per_s=125e12, host_bytes_per_s=150e9, network_bytes_per_s=12.5e9),
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
}
