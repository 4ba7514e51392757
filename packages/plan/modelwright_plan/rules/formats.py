"""The number formats for whose matrix products the processor has instructions, by what the system says about it."""

from collections.abc import Set
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = {"avx512_bf16": "bf16", "amx_bf16": "bf16", "amx_fp16": "fp16"}
"""AVX512-FP16 is left out: PyTorch's matrix products do not use it."""
GPU_CAPABILITIES = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""From NVIDIA's compute capability on: Volta, Ampere, Ada and Hopper."""


def number_formats(device: str, cpu_info: Path = CPU_INFO) -> Set[str]:
    """FP32, and what else `device` (`cpu` or `cuda`) multiplies in hardware."""
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return {"fp32"} | {name for name, least in GPU_CAPABILITIES.items() if capability >= least}
    try:
        text = cpu_info.read_text(encoding="utf-8")
    except OSError:
        return {"fp32"}
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return {"fp32"} | {name for flag, name in CPU_FLAGS.items() if flag in line.split()}
