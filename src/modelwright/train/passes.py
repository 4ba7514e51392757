"""Model passes, `model -> model`, in their one fixed order.

Tensor parallelism changes what the layers are, so it comes first. Activation checkpointing wraps blocks next, so that
compile sees (and may fuse across) what is computed again; FSDP, which gathers whole blocks, comes last. Precision is no
pass of its own here: it is the context (`autocast`) in which the runner computes forward and losses.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from modelwright.memory.checkpointing import checkpoint_blocks
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import Mesh
from modelwright.parallel.pipeline import Pipeline
from modelwright.parallel.shard import shard_states
from modelwright.parallel.tensor import shard_layers
from modelwright.train.runner import Runner, WholeModel


def spread(
    model: Decoder,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activation_checkpoint_every: int,
    compile_blocks: bool,
    autocast: Callable[[], AbstractContextManager],
) -> Runner:
    """Lay the model out over the mesh, in place; a pipeline keeps this rank's layers only.

    Every rank begins with the same whole model. The runner's `model` has this rank's parameters under their names.
    """

    def passes(part: Decoder) -> Decoder:
        return apply_passes(
            part,
            mesh=mesh,
            parallel=parallel,
            activation_checkpoint_every=activation_checkpoint_every,
            compile_blocks=compile_blocks,
        )

    if mesh.pipeline.size > 1:
        return Pipeline(model, parallel, mesh, passes=passes, autocast=autocast)
    scatters_each = parallel.shard in ("gradients", "full")
    return WholeModel(passes(model), mesh.context, scatters_each=scatters_each, autocast=autocast)


def apply_passes(
    model: Decoder, *, mesh: Mesh, parallel: ParallelConfig, activation_checkpoint_every: int, compile_blocks: bool
) -> Decoder:
    """Apply the passes that are switched on, in place; parameter names stay as they are. Returns the model."""
    if mesh.devices is not None and mesh.tensor.size > 1:
        model = shard_layers(model, mesh.devices["tensor"], sequence_parallel=parallel.sequence_parallel)
    if activation_checkpoint_every:
        model = checkpoint_blocks(model, activation_checkpoint_every)
    if compile_blocks:
        model = compile_each_block(model)
    if mesh.devices is not None and parallel.shard != "none":
        model = shard_states(model, mesh.devices["sharing"], parallel.shard)
    return model


def compile_each_block(model: Decoder, *, backend: str = "inductor") -> Decoder:
    """`torch.compile` block by block: one graph serves all of them, so starting costs one compilation."""
    for block in model.blocks.values():
        block.compile(backend=backend)
    return model


def remove_passes(model: Decoder) -> None:
    """Take the passes off again, so that the model is plain once more (and may be trained again)."""
    for block in model.blocks.values():
        block.__dict__.pop("forward", None)
        block._compiled_call_impl = None
