"""Splits a model into pipeline stages: which rank holds which stage, and the submodules of each stage.

The model of a stage is a `Decoder` with some of the whole model's modules, under their own names.

The number of microbatches whose activations a pipeline rank holds, by schedule.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters", section 2.2 (1F1B, interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6.
The order of work is PyTorch's (`torch.distributed.pipelining.schedules`).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from modelwright.core.config import ConfigError
from modelwright.model.decoder import HEAD_METHODS, Decoder, ModelConfig
from modelwright.parallel.mesh import ParallelConfig, Schedule
from modelwright.parallel.pipeline.balance import flop_costs, split_layers


def is_v_shaped(config: ParallelConfig) -> bool:
    """Returns whether stages run down the ranks and up again (ZB-V: Qi et al. 2023, section 6), so that the first rank
    holds the first stage and the last; otherwise they wrap around.
    """
    return config.schedule == "zero_bubble" and config.stages_per_rank == 2


def rank_of_stage(config: ParallelConfig) -> list[int]:
    """Returns the rank along the pipeline axis that holds each stage."""
    down = list(range(config.pipeline))
    if is_v_shaped(config):
        return down + down[::-1]
    return down * config.stages_per_rank


def layers_of_stages(model: ModelConfig, config: ParallelConfig) -> list[range]:
    """Returns the layers of each stage: `layers_per_stage`, or a split balanced by FLOPs. Raises `ConfigError` if the
    layers do not fit the stages.
    """
    sizes = config.layers_per_stage
    if not sizes:
        costs = flop_costs(model, mean_context=model.max_seq_len / 2)
        sizes = split_layers(costs, config.pipeline * config.stages_per_rank)
    if sum(sizes) != model.num_layers:
        raise ConfigError(
            f"layers_per_stage: {tuple(sizes)} adds up to {sum(sizes)}, but the model has {model.num_layers} layers"
        )
    # The end stages have work without layers: the embedding, or the head.
    if 0 in sizes[1:-1]:
        raise ConfigError("layers_per_stage: only the first and the last stage may be without layers")
    return [range(first, end) for first, end in pairwise([0, *accumulate(sizes)])]


def check_microbatches(config: ParallelConfig, num_microbatches: int) -> None:
    """Raises `ConfigError` if the schedule cannot run that many microbatches."""
    if config.pipeline == 1 or config.schedule in ("gpipe", "1f1b") or is_v_shaped(config):
        return
    # PyTorch's interleaved schedules run rounds of equal numbers of microbatches.
    num_rounds = max(1, num_microbatches // config.pipeline)
    if num_microbatches % num_rounds:
        below, above = (n - n % config.pipeline for n in (num_microbatches, num_microbatches + config.pipeline))
        raise ConfigError(
            f"gradient_accumulation_steps: {num_microbatches} is not a multiple of parallel.pipeline "
            f"({config.pipeline}), which the {config.schedule} schedule needs; use {below} or {above}, or schedule 1f1b"
        )


def check_ties(model: ModelConfig, config: ParallelConfig) -> None:
    """Raises `ConfigError` if one rank would have to shard a tied embedding for two stages."""
    if model.tie_embeddings and is_v_shaped(config) and (config.zero_stage != 0 or config.tensor > 1):
        raise ConfigError(
            "stages_per_rank: zero_bubble with 2 puts a tied embedding into two stages of one rank, which cannot be "
            "sharded; use stages_per_rank 1, another schedule, or zero_stage 0 and tensor 1"
        )


def check_blocks(part: Decoder, config: ParallelConfig) -> None:
    """Raises `ConfigError` if passes have created blocks that zero_bubble cannot split."""
    # The schedule computes weight gradients separately, from the middle of the graph: a recomputed block would be
    # recomputed for every weight, and the inside of a compiled one cannot be reached.
    whole = [block for block in part.blocks.values() if "forward" in vars(block) or block._compiled_call_impl]
    if config.schedule == "zero_bubble" and (whole or "run_blocks" in vars(part)):
        raise ConfigError(
            "schedule: zero_bubble computes the gradients of weights separately from those of activations and "
            "supports neither activation checkpointing or offload nor compile; disable them, or use 1f1b or "
            "interleaved"
        )


def cut(model: Decoder, layers: range, *, is_first: bool, is_last: bool) -> Decoder:
    """The part of `model` with these layers, modules shared; the last has the heads, which may need the embedding."""
    needs_embedding = is_first or (is_last and model.config.tie_embeddings)
    return _assemble(
        model,
        embedding=model.embedding if needs_embedding else None,
        blocks={str(layer): model.blocks[str(layer)] for layer in layers},
        norm=model.norm if is_last else None,
        head=model.head if is_last else None,
        heads=model.heads if is_last else nn.ModuleDict(),
    )


def join(parts: Sequence[Decoder]) -> Decoder:
    """Joins all stages of one rank into one model, modules shared; its head is the last stage's."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    joined = _assemble(
        last,
        embedding=next((part.embedding for part in parts if part.embedding is not None), None),
        blocks={name: block for part in parts for name, block in part.blocks.items()},
        norm=last.norm,
        head=last.head,
        heads=last.heads,
    )
    # Passes may have replaced these methods on the part, where a method of the class would be found instead.
    for method in HEAD_METHODS:
        joined.__dict__[method] = getattr(last, method)
    return joined


def _assemble(
    model: Decoder,
    *,
    embedding: nn.Module | None,
    blocks: dict[str, nn.Module],
    norm: nn.Module | None,
    head: nn.Module | None,
    heads: nn.Module,
) -> Decoder:
    # `Decoder.__init__` would allocate the whole model. Names come in the whole model's order, as in its checkpoints.
    part = Decoder.__new__(Decoder)
    nn.Module.__init__(part)
    part.config = model.config
    part.ends = model.ends
    part.stored = model.stored
    part.embedding_hooks = model.embedding_hooks
    part.adapters, part.base_fingerprint = model.adapters, model.base_fingerprint
    ends = {"embedding": embedding, "blocks": nn.ModuleDict(blocks), "norm": norm, "head": head, "heads": heads}
    for name, module in ends.items():
        setattr(part, name, module)
    return part


def microbatches_in_flight(
    schedule: Schedule, *, pipeline: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> float:
    """Returns the largest number of microbatches whose activations a pipeline rank holds for all its layers. A rank
    with several stages counts each as that fraction of a microbatch.
    """
    if pipeline == 1:
        return 1.0
    if schedule == "gpipe":
        return float(num_microbatches)
    if schedule == "zero_bubble":
        # Rank r delays the gradients of weights by r microbatches, so all ranks hold equally many.
        return float(min(num_microbatches, pipeline))
    # Forwards that a rank makes before its first backward returns: one for each later rank, and its own.
    hops = pipeline - 1 - rank
    if schedule == "1f1b":
        return float(min(num_microbatches, hops + 1))
    per_round = num_microbatches // max(1, num_microbatches // pipeline)
    held = (stages_per_rank - 1) * per_round + 2 * hops + 1
    return min(held, num_microbatches * stages_per_rank) / stages_per_rank
