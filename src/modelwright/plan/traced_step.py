"""One training step of a configuration, traced on fake tensors: what would be alive when, on one process.

The step is the loop's own (`train.step.TrainStep`, with the passes and updates that the configuration asks for), its
second one, when optimizer states exist. `compile` is left out, for what a compiler fuses does not show, and formats
stay as they begin. Knows no recipe.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelwright.core.errors import ConfigError
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.memory.config import Tier
from modelwright.memory.disk import MOST_QUEUED_BYTES, READ_AHEAD
from modelwright.memory.lifetimes import Timeline
from modelwright.memory.offload import Nowhere
from modelwright.memory.trace import StepTrace, fake_model
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.optim.update import FiniteCheck
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import lay_out, single
from modelwright.parallel.gradient_sync import ExactTransport
from modelwright.parallel.strategy import Together
from modelwright.precision.adaptive_config import AdaptiveConfig
from modelwright.precision.model import ModelFormats
from modelwright.train.config import TrainConfig
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.parallelize import activation_pass, remove_passes, spread
from modelwright.train.step import TrainStep

ObjectiveOf = Callable[[BatchSource], Objective]


@dataclass(frozen=True)
class SameRows:
    """Every batch is this one: whole rows of one document each, with every token but the last of a row predicted."""

    rows: TokenBatch
    num_batches_per_epoch: int = 1

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return self.rows


def trace_step(
    model: ModelConfig, train: TrainConfig, objective_of: ObjectiveOf, *, seq_len: int, fake: bool = True
) -> Timeline:
    """The timeline of one step on one process, on the CPU. fake: without computing anything, nor memory.

    Raises `ConfigError` when the batch does not divide into rows and microbatches.
    """
    if train.precision.policy == "fastest":
        raise ConfigError("precision.policy: 'fastest' is not settled yet; set fp32 or bf16_mixed")
    train = replace(train, precision=replace(train.precision, adaptive=AdaptiveConfig()))
    rows = train.batch_rows(seq_len)
    decoder = fake_model(lambda: Decoder(model)) if fake else Decoder(model)
    assert isinstance(decoder, Decoder)
    if not fake:
        decoder.init_weights(0)
    trace = StepTrace(decoder)
    with trace.places():
        one_step = _step(decoder, train, objective_of(SameRows(_rows(rows, seq_len, model.vocab_size))), rows * seq_len)
        _leave_norms_out(one_step)
        with trace:
            one_step.begin(0)
            one_step(0)
            trace.begin()
            one_step(1)
            found = trace.timeline()
    remove_passes(decoder)
    return found


def _step(decoder: Decoder, train: TrainConfig, objective: Objective, batch_tokens: int) -> TrainStep:
    world, parallel = single(), ParallelConfig()
    mesh = lay_out(world, parallel)
    runner = spread(
        decoder,
        mesh=mesh,
        parallel=parallel,
        activations=activation_pass(
            train.activations,
            precision=train.precision,
            tokens_per_microbatch=batch_tokens // train.num_microbatches,
            num_microbatches=train.num_microbatches,
            parallel=parallel,
            store=_traced_store(train.activations.offload),
        ),
        compile_blocks=False,
        precision=train.precision,
    )
    return TrainStep(
        runner=runner,
        objective=objective,
        config=train,
        num_steps=2,
        turns=Together(mesh),
        everyone=mesh,
        seed=0,
        peak_flops=0.0,
        transport=ExactTransport(world),
        formats=ModelFormats(runner.model, train.precision),
        folder=Path(os.devnull),
    )


def _traced_store(tier: Tier) -> Nowhere:
    return Nowhere(queued_bytes=MOST_QUEUED_BYTES, read_ahead=READ_AHEAD) if tier == "disk" else Nowhere()


def _leave_norms_out(one_step: TrainStep) -> None:
    """Of a large model they are made of a great many small pieces, none of which lasts."""
    check = one_step.updates["finite_check"]
    assert isinstance(check, FiniteCheck)
    check.norm = lambda gradients: one_step.in_backward.norm() if one_step.in_backward else 1.0
    if one_step.in_backward:
        one_step.in_backward.norm_of = lambda gradients: 1.0


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
