"""Which weights a model has, in a few characters."""

import hashlib

import torch
from torch import Tensor

from modelwright.model.decoder import Decoder

FINGERPRINT_LEN = 12


def adapted_fingerprint(base: str, digest: str) -> str:
    """The same for a model of a fingerprint with an adapter, whose values have a digest."""
    return f"fp_{hashlib.sha256(f'{base} {digest}'.encode()).hexdigest()[:FINGERPRINT_LEN]}"


def weights_fingerprint(model: Decoder) -> str:
    """A hash over names, formats and values of the tensors that a model computes with: "fp_" and 12 hex digits."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
        hashed.update(plain.view(-1).view(torch.uint8).numpy().data)
    return f"fp_{hashed.hexdigest()[:FINGERPRINT_LEN]}"
