"""Model passes, `model -> model`, in their one fixed order.

Tensor parallelism changes what the layers are, so it comes first. Activation checkpointing wraps blocks next, so that
compile sees (and may fuse across) what is computed again; FSDP, which gathers whole blocks, comes last. Precision is no
pass of its own here: it is the context (`autocast`) in which the runner computes forward and losses.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from modelwright.memory.activations import block_shape
from modelwright.memory.checkpointing import checkpoint_segments, remove_checkpoints, segments_for
from modelwright.memory.config import ActivationConfig
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import Mesh
from modelwright.parallel.pipeline import Pipeline
from modelwright.parallel.shard import shard_states
from modelwright.parallel.tensor import shard_layers
from modelwright.precision.policy import PrecisionConfig, compute_dtype
from modelwright.train.runner import Runner, WholeModel


def spread(
    model: Decoder,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activations: Callable[[Decoder], Decoder],
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
            activations=activations,
            compile_blocks=compile_blocks,
        )

    if mesh.pipeline.size > 1:
        return Pipeline(model, parallel, mesh, passes=passes, autocast=autocast)
    scatters_each = parallel.shard in ("gradients", "full")
    return WholeModel(passes(model), mesh.context, scatters_each=scatters_each, autocast=autocast)


def apply_passes(
    model: Decoder,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activations: Callable[[Decoder], Decoder],
    compile_blocks: bool,
) -> Decoder:
    """Apply the passes that are switched on, in place; parameter names stay as they are. Returns the model."""
    if mesh.devices is not None and mesh.tensor.size > 1:
        model = shard_layers(model, mesh.devices["tensor"], sequence_parallel=parallel.sequence_parallel)
    model = activations(model)
    if compile_blocks:
        model = compile_each_block(model)
    if mesh.sharing_devices is not None and parallel.shard != "none":
        model = shard_states(model, mesh.sharing_devices, parallel.shard)
    return model


def activation_pass(
    config: ActivationConfig,
    *,
    precision: PrecisionConfig,
    tokens_per_microbatch: int,
    num_microbatches: int,
    parallel: ParallelConfig,
) -> Callable[[Decoder], Decoder]:
    """The pass for what blocks keep from forward to backward.

    tokens_per_microbatch: of one rank.
    """
    gpipe = parallel.pipeline > 1 and parallel.schedule == "gpipe"
    in_flight = num_microbatches if gpipe else min(num_microbatches, parallel.pipeline)

    def apply(model: Decoder) -> Decoder:
        if config.mode == "none" and not config.offload:
            return model
        shape = block_shape(
            model.config,
            compute="bf16" if compute_dtype(precision) == torch.bfloat16 else "fp32",
            mean_context=model.config.max_seq_len / 2,
            tensor=parallel.tensor,
            sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        )
        segments = segments_for(
            config, len(model.blocks), shape=shape, num_tokens=tokens_per_microbatch, in_flight=in_flight
        )
        return checkpoint_segments(model, segments, offload=config.offload)

    return apply


def compile_each_block(model: Decoder, *, backend: str = "inductor") -> Decoder:
    """`torch.compile` block by block: one graph serves all of them, so starting costs one compilation."""
    for block in model.blocks.values():
        block.compile(backend=backend)
    return model


def remove_passes(model: Decoder) -> None:
    """Take the passes off again, so that the model is plain once more (and may be trained again)."""
    remove_checkpoints(model)
    for block in model.blocks.values():
        block._compiled_call_impl = None
