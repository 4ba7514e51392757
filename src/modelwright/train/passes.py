"""Model passes, `model -> model`, in their one fixed order.

Activation checkpointing wraps blocks first, so that compile sees (and may fuse across) what is computed again; a
compiled block comes last before sharding. Precision is no pass of its own here: it is the context (`autocast`) in
which the loop runs forward and losses. Later passes take their place in this list, not in the model file.
"""

from modelwright.memory.checkpointing import checkpoint_blocks
from modelwright.model.decoder import Decoder


def apply_passes(model: Decoder, *, activation_checkpoint_every: int, compile_blocks: bool) -> Decoder:
    """Apply the passes that are switched on, in place; parameter names stay as they are. Returns the model."""
    if activation_checkpoint_every:
        model = checkpoint_blocks(model, activation_checkpoint_every)
    if compile_blocks:
        model = compile_each_block(model)
    return model


def compile_each_block(model: Decoder, *, backend: str = "inductor") -> Decoder:
    """`torch.compile` block by block: one graph serves all of them, so starting costs one compilation."""
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def remove_passes(model: Decoder) -> None:
    """Take the passes off again, so that the model is plain once more (and may be trained again)."""
    for block in model.blocks:
        block.__dict__.pop("forward", None)
        block._compiled_call_impl = None
