"""Activation checkpointing: blocks keep their input only and are computed again in the backward pass.

A model pass, `model -> model`, that changes the blocks in place and leaves parameter names alone. Gradients are the
same to the last bit on one device (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder


def checkpoint_blocks(model: Decoder, every: int) -> Decoder:
    """Checkpoint every `every`-th block: 1 all of them (least memory, about a third more compute), 2 every other.

    Blocks 0, `every`, 2 * `every`, ... are wrapped. Returns the same model. Raises `ConfigError` below 1.
    """
    if every < 1:
        raise ConfigError(f"every: must be at least 1, got {every}; leave the pass out to keep all activations")
    for block in list(model.blocks.values())[::every]:
        _checkpoint_module(block)
    return model


def _checkpoint_module(module: nn.Module) -> None:
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
