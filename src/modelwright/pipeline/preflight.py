"""Checks everything about training that can be known before any data is prepared: layouts, shapes, rows, devices. Every
message starts with the full path of the field to change. Reads and writes no files.
"""

import math
from collections.abc import Mapping, Sequence

from modelwright.core.compatibility import feature
from modelwright.core.errors import ConfigError, prefix_errors
from modelwright.memory.offload import check_tier
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.context_parallel import check_context, local_spans
from modelwright.parallel.pipeline.stages import check_microbatches, check_ties, layers_of_stages
from modelwright.parallel.tensor_parallel import check_shape, stage_tokens
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.resolve import check_size, resolved_device
from modelwright.pipeline.stage import StageSpec
from modelwright.pipeline.stages.augmented_rows import is_augmented
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import model_before
from modelwright.train.config import TrainConfig, check_layout
from modelwright.train.monitors.codecarbon_tracker import known_country
from modelwright.train.techniques.augmentation_strength import NEEDS as AUGMENTATION_NEEDS


def check_training(config: RunConfig, layout: ParallelConfig, *, num_processes: int, stages: Sequence[str]) -> None:
    """Check whether `num_processes` laid out as `layout` can do the trainings among `stages` (names).
    `config.model` is the model that is trained. Raises `ConfigError`.
    """
    trainings = {stage.name: stage for stage in config.trainings if stage.name in stages}
    if not trainings:
        return
    check_size(config.model)
    with prefix_errors("parallel"):
        axes = layout.axes(num_processes)
    _check_model(config, layout)
    for name, stage in trainings.items():
        learned = [feature(name, needs=stage.run_needs)]
        if is_augmented(config, stage):
            learned.append(feature("augmentation.methods", needs=AUGMENTATION_NEEDS))
        with prefix_errors(name):
            check_layout(config.section(name), layout, num_processes=math.prod(axes.values()))
        # Outside of the prefix: these are no settings of the stage.
        check_layout(config.section(name), layout, num_processes=math.prod(axes.values()), further=learned)
        with prefix_errors(name):
            _check_stage(stage, layout, config, axes)
            if not model_before(config, name) and config.section(name).batch_selection.max_initial_loss:
                raise ConfigError(
                    "batch_selection.max_initial_loss: the initial weights of a run from scratch have the loss "
                    "of a random guess everywhere; start from a trained model with init_from, or leave it at 0"
                )


def _check_model(config: RunConfig, layout: ParallelConfig) -> None:
    try:
        check_shape(config.model, layout.tensor)
    except ConfigError as error:
        raise ConfigError(f"parallel.tensor: {layout.tensor} does not fit the model (model.{error})") from None
    row_len = config.section(PACK).seq_len
    with prefix_errors("parallel"):
        if layout.pipeline > 1:
            layers_of_stages(config.model, layout)
            check_ties(config.model, layout)
        if layout.context > 1:
            local_spans(row_len, layout.context, 0)
            check_context(config.model, layout.context, layout.context_attention)
        stage_tokens(row_len // layout.context, layout.tensor, sequence_parallel=layout.sequence_parallel)


def _check_stage(stage: StageSpec, layout: ParallelConfig, config: RunConfig, axes: Mapping[str, int]) -> None:
    training: TrainConfig = config.section(stage)
    learns_tokens = type(training) is TrainConfig and stage.rows is not None and stage.rows.learned == "tokens"
    if training.objective and not learns_tokens:
        raise ConfigError(
            f"objective: {', '.join(training.objective)} would take the place of what {stage.name} learns by settings "
            "and rows of its own; name it in a stage that learns the next token, such as pretrain or sft"
        )
    num_copies = training.num_copies(axes)
    group_tokens = config.section(PACK).seq_len * stage.trained_rows
    num_groups = training.batch_rows(group_tokens, num_copies=num_copies) // num_copies
    if training.batch_selection.signal != "none":
        training.batch_selection.num_chosen(num_groups, training.gradient_accumulation_steps)
    check_microbatches(layout, training.gradient_accumulation_steps)
    kept, on_cpu = training.activation_checkpointing, resolved_device(config.hardware.device) == "cpu"
    if training.precision.fp32_matmul == "onednn" and not on_cpu:
        raise ConfigError("precision.fp32_matmul: onednn needs a CPU, and this run uses a GPU; choose default or tf32")
    if training.optimizer_cpu_offload and on_cpu:
        raise ConfigError("optimizer_cpu_offload: has no effect on a CPU run; disable it")
    if training.optimizer_cpu_offload and training.async_updates.mode == "hogwild":
        raise ConfigError(
            "optimizer_cpu_offload: async_updates.mode hogwild shares the optimizer states; disable one of them"
        )
    if training.energy.country:
        known_country(training.energy.country, "energy.country")
    with prefix_errors("activation_checkpointing"):
        check_tier(kept, on_cpu=on_cpu)
    zero_bubble = layout.pipeline > 1 and layout.schedule == "zero_bubble"
    if zero_bubble and (training.compile or kept.offload != "none" or kept.mode in ("full", "selective")):
        name = "compile" if training.compile else "activation_checkpointing"
        raise ConfigError(
            f"{name}: is incompatible with parallel.schedule zero_bubble, which splits blocks; disable it, or use "
            "1f1b or interleaved"
        )
