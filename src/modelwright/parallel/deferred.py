"""Weights that stay on disk until a model is laid out: each rank reads its own part of each file, and nothing else.

`model.hf.deferred_model` makes such a model, with parameters on the meta device.
"""

import torch

from modelwright.model.decoder import Decoder
from modelwright.ops.dtensor import local
from modelwright.parallel.full_state import own_part


def is_deferred(model: Decoder) -> bool:
    """Returns whether the model's weights are still on disk."""
    return model.stored is not None and any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def read_deferred(model: Decoder, device: torch.device) -> None:
    """Allocates this rank's shards on the device and reads them, in place; does nothing if the weights are loaded."""
    if not is_deferred(model):
        return
    assert model.stored is not None
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        own = own_part(parameter)
        # With more ranks than rows a rank's shard is empty, and there is no such slice in the file.
        if all(part.start < part.stop for part in own):
            local(parameter).copy_(model.stored.read(name, own))
