"""One training step of a configuration, traced on fake tensors: the memory that would be alive over time, on one
process.

The step is the one that training runs, made by the same builder (`train.build.build_step`): its second one, when
optimizer states exist. `compile` is left out, because the effect of fusion is not visible, and formats stay as they
start.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelwright.core.errors import ConfigError
from modelwright.core.rundir import StageDir
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import build_mesh, single
from modelwright.train.build import build_step
from modelwright.train.config import TrainConfig
from modelwright.train.job import Session, TrainJob
from modelwright.train.memory.disk import MOST_QUEUED_BYTES, READ_AHEAD
from modelwright.train.memory.offload import Nowhere
from modelwright.train.memory.step_arena import MemoryTimeline
from modelwright.train.memory.trace import StepTrace, fake_model
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.precision.policy import AdaptiveConfig

ObjectiveOf = Callable[[BatchSource], Objective]


@dataclass(frozen=True)
class SameRows:
    """A loader that always returns this batch: whole rows of one document each, with every token but the last of a row
    predicted.
    """

    rows: TokenBatch
    num_batches_per_epoch: int = 1

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return self.rows


def trace_step(
    model: ModelConfig, train: TrainConfig, objective_of: ObjectiveOf, *, seq_len: int, fake: bool = True
) -> MemoryTimeline:
    """The timeline of one step on one process, on the CPU. fake: without computing or allocating anything. Raises
    `ConfigError` if the batch does not divide into rows and microbatches.
    """
    if train.precision.policy == "auto":
        raise ConfigError("precision.policy: 'auto' is not resolved yet; set fp32 or bf16_mixed")
    train = replace(train, precision=replace(train.precision, adaptive=AdaptiveConfig()))
    rows = train.batch_rows(seq_len)
    decoder = fake_model(lambda: Decoder(model)) if fake else Decoder(model)
    assert isinstance(decoder, Decoder)
    if not fake:
        decoder.init_weights(0)
    on_disk = train.activation_checkpointing.offload == "disk"
    decoder.base_fingerprint = "fake"  # adapters are not compared with the values that there are not
    trace = StepTrace(decoder)
    with ExitStack() as exit_stack, trace.places():
        world = single()
        job = TrainJob(
            model=decoder,
            objective=objective_of(SameRows(_rows(rows, seq_len, model.vocab_size))),
            config=replace(train, compile=False, batch_tokens=rows * seq_len),
            stage=StageDir(Path(os.devnull)),
            num_steps=2,
            # Norms of a large model take a great many small temporary tensors, and have no value on fake ones.
            measure_grad_norm=False,
        )
        store = Nowhere(queued_bytes=MOST_QUEUED_BYTES, read_ahead=READ_AHEAD) if on_disk else Nowhere()
        session = Session.untracked(world, store)
        parts = build_step(job, build_mesh(world, job.parallel), session, exit_stack)
        with trace:
            parts.run.strategy.begin(0, 2)
            parts.run.model.train()
            parts.one_step(0)
            trace.begin()
            parts.one_step(1)
            timeline = trace.timeline()
    return timeline


def _rows(num_rows: int, seq_len: int, vocab_size: int) -> TokenBatch:
    """Token ids do not matter to memory; labels that do not count do."""
    tokens_BT = torch.arange(num_rows * seq_len).view(num_rows, seq_len) % vocab_size
    labels_BT = tokens_BT.roll(-1, dims=1)
    labels_BT[:, -1] = IGNORED
    return TokenBatch(
        input_ids_BT=tokens_BT,
        labels_BT=labels_BT,
        positions_BT=torch.arange(seq_len).repeat(num_rows, 1),
        segments_BT=torch.zeros(num_rows, seq_len, dtype=torch.int32),
    )
