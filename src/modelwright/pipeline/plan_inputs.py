"""A run's training in the planner's terms: what is trained, and how it is laid out over the processes."""

from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stages.pack import PACK
from modelwright.plan.layout import Layout, TrainingJob
from modelwright.train.config import TrainConfig


def planned(
    config: RunConfig, training: TrainConfig, layout: ParallelConfig, num_processes: int
) -> tuple[TrainingJob, Layout]:
    """The job and layout of one training stage. Raises `ConfigError` if the layout does not divide the batch."""
    copies = training.num_copies(layout.axes(num_processes))
    seq_len = config.section(PACK).seq_len
    rows = training.batch_rows(seq_len, num_copies=copies)
    job = TrainingJob(
        model=config.model,
        seq_len=seq_len,
        batch_tokens=training.batch_tokens,
        compute=training.precision.planned_as,
    )
    placed = Layout(
        parallel=layout,
        num_devices=num_processes,
        microbatch_rows=rows // (copies * training.gradient_accumulation_steps),
        activations=training.activation_checkpointing,
    )
    return job, placed
