"""Model passes, `model -> model`, in their one fixed order.

Tensor parallelism replaces the layers, so it comes first. Activation checkpointing comes before compile, which sees
(and may fuse across) the recomputation; FSDP, which gathers whole blocks, comes last. Number formats of products
(`precision/apply.py`) are set on the finished layers, because they may change while the model trains.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from modelwright.model.decoder import Decoder
from modelwright.ops import cpu_kernels
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.parallel.context_parallel import check_context
from modelwright.parallel.mesh import Mesh, ParallelConfig
from modelwright.parallel.pipeline.stages import layers_of_stages, microbatches_in_flight, rank_of_stage
from modelwright.parallel.sharded_weights import read_deferred, shard_states
from modelwright.parallel.tensor_parallel import shard_layers
from modelwright.train.memory.activations import ActivationCheckpointingConfig, block_shape, head_workspace_bytes
from modelwright.train.memory.checkpointing import checkpoint_segments, remove_checkpoints, segments_for
from modelwright.train.memory.offload import Store
from modelwright.train.objective import Executor, WholeModel
from modelwright.train.precision.apply import remove_formats
from modelwright.train.precision.policy import PrecisionConfig


def parallelize(
    model: Decoder,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activations: Callable[[Decoder], Decoder],
    compile_blocks: bool,
    precision: PrecisionConfig,
    scatters_each: bool = False,
) -> Executor:
    """Lay the model out over the mesh, in place; with a pipeline this rank keeps only its layers. scatters_each:
    sharded gradients are scattered after each microbatch at every stage of ZeRO. Every rank starts with the same whole
    model. The executor's `model` has this rank's parameters under their names. Raises `ConfigError` if the model does
    not divide over the mesh.
    """
    check_context(model.config, mesh.context.size, parallel.context_attention)
    passes = partial(
        apply_passes,
        mesh=mesh,
        parallel=parallel,
        activations=activations,
        compile_blocks=compile_blocks,
        precision=precision,
    )
    if mesh.pipeline.size > 1:
        from modelwright.parallel.pipeline.runner import Pipeline  # its schedules import TorchDynamo, which takes 0.5 s

        return Pipeline(model, parallel, mesh, passes=passes)
    scatters_each |= parallel.zero_stage >= 2
    return WholeModel(
        passes(model), mesh.context, scatters_each=scatters_each, context_attention=parallel.context_attention
    )


def apply_passes(
    model: Decoder,
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    activations: Callable[[Decoder], Decoder],
    compile_blocks: bool,
    precision: PrecisionConfig,
) -> Decoder:
    """Apply the enabled passes, in place, without changing parameter names. Returns the model."""
    if mesh.devices is not None and mesh.tensor.size > 1:
        model = shard_layers(model, mesh.devices["tensor"], sequence_parallel=parallel.sequence_parallel)
    model = activations(model)
    if compile_blocks:
        model = compile_each_block(model)
    if mesh.sharing_devices is not None and parallel.zero_stage != 0:
        formats = {"attention": precision.gathered_as("attention"), "ffn": precision.gathered_as("ffn")}
        model = shard_states(model, mesh.sharing_devices, parallel.zero_stage, formats)
    read_deferred(model, mesh.world.device)
    return model


def activation_pass(
    config: ActivationCheckpointingConfig,
    *,
    precision: PrecisionConfig,
    tokens_per_microbatch: int,
    num_microbatches: int,
    parallel: ParallelConfig,
    store: Store | None,
    pipeline_rank: int = 0,
) -> Callable[[Decoder], Decoder]:
    """Returns the pass that saves, recomputes and offloads activations. tokens_per_microbatch: of one rank. A budget
    applies to the rank: its stages share it by their numbers of layers. store: for offloaded activations, if
    configured.
    """
    in_flight = microbatches_in_flight(
        parallel.schedule,
        pipeline=parallel.pipeline,
        rank=pipeline_rank,
        stages_per_rank=parallel.stages_per_rank,
        num_microbatches=num_microbatches,
    )

    def apply(model: Decoder) -> Decoder:
        if config.mode == "none" and config.offload == "none":
            return model
        floats = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        layers, owners = layers_of_stages(model.config, parallel), rank_of_stage(parallel)
        shape = block_shape(
            model.config,
            compute=precision.planned_as,
            mean_context=model.config.max_seq_len / 2,
            tensor=parallel.tensor,
            sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
            fused=all(cpu_kernels.take(name, *floats) for name in ("norm", "gated_activation")),
        )
        # The budget is for the rank, which may hold several stages: this one gets its share by layers.
        rank_layers = sum(len(held) for held, owner in zip(layers, owners, strict=True) if owner == pipeline_rank)
        share = len(model.blocks) / max(1, rank_layers)
        head_bytes = head_workspace_bytes(
            model.config, num_tokens=tokens_per_microbatch, chunk_tokens=CHUNK_TOKENS, tensor=parallel.tensor
        )
        segments = segments_for(
            replace(config, budget_bytes=math.ceil(config.budget_bytes * share)) if share else config,
            len(model.blocks),
            shape=shape,
            num_tokens=tokens_per_microbatch,
            in_flight=math.ceil(in_flight),
            end_bytes=head_bytes if owners[-1] == pipeline_rank else 0,
        )
        return checkpoint_segments(model, segments, store=store)

    return apply


def compile_each_block(model: Decoder, *, backend: str = "inductor") -> Decoder:
    """`torch.compile` block by block: one graph serves all of them, so startup costs one compilation."""
    for block in model.blocks.values():
        block.compile(backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return model


def remove_passes(model: Decoder) -> None:
    """Remove the passes, so that the model is plain again (and can be trained again)."""
    remove_checkpoints(model)
    remove_formats(model)
    for block in model.blocks.values():  # `Module.compile` has no inverse
        block._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
