"""Hugging Face model types that can be read and written, one entry each.

A new type is a file with its `HfType` and a line in this list.
"""

from collections.abc import Sequence

from modelwright.model.hf_types.gemma import GEMMA2, GEMMA3
from modelwright.model.hf_types.hf_type import HfType
from modelwright.model.hf_types.llama import LLAMA
from modelwright.model.hf_types.mistral import MISTRAL
from modelwright.model.hf_types.own import OWN
from modelwright.model.hf_types.phi3 import PHI3
from modelwright.model.hf_types.qwen import QWEN2, QWEN3
from modelwright.model.hf_types.smollm3 import SMOLLM3

HF_TYPES: Sequence[HfType] = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3, PHI3, SMOLLM3, OWN)
