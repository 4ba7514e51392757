"""Quantization-aware training in a run: start of rounding, ranges of activations, initial values of learned steps.

Ranges are those of all ranks. They are observed in the steps before rounding begins, and fixed from then on.
"""

import json

from modelwright.core.artifacts import write_atomic
from modelwright.core.compatibility import EAGER_BLOCKS, TRAINED_WEIGHTS, WHOLE_LAYERS
from modelwright.parallel.full_state import put, whole_weights
from modelwright.train.objective import Batch
from modelwright.train.precision.quantization_aware import FakeQuantization, QuantizationAwareConfig, initial_steps
from modelwright.train.runtime import Runtime
from modelwright.train.technique import StepInfo, Technique, Update

NEEDS = frozenset({WHOLE_LAYERS, EAGER_BLOCKS, TRAINED_WEIGHTS})
RANGES = "activation_ranges.json"
"""The file, in the folder of the stage, with the final range of each projection's inputs."""


def fake_quantization(config: QuantizationAwareConfig, run: Runtime) -> Technique:
    """Round the factors of all projections from `config.start_step` on."""
    rounding = FakeQuantization(config=config, model=run.model)
    run.formats.quantize(rounding.wrap)

    def on_batch(step: int, batch: Batch) -> Batch:
        if config.learned_steps and step in (0, config.start_step):
            # Learned steps start from the present weights; all ranks set the same values.
            parameters = dict(run.model.named_parameters())
            weights, names = whole_weights(run.model, run.mesh), list(run.model.projections())
            for name, value in initial_steps(weights, names, config.weights).items():
                put(parameters[name], value.to(parameters[name].dtype))
        rounding.is_on = step >= config.start_step
        rounding.is_observing = config.has_observers and not rounding.is_on
        rounding.begin_step()
        return batch

    def on_gradients(update: Update) -> None:
        if not update.skipped:  # all ranks skip alike, so all of them enter the collective or none
            rounding.collect(lambda values: run.mesh.world.maxima(*values))

    def on_step_end(info: StepInfo) -> None:
        if info.step == run.num_steps and run.is_first:
            write_atomic(run.folder / RANGES, json.dumps(rounding.state_dict()))

    return Technique(
        name="fake_quantization",
        on_batch=on_batch,
        on_gradients=on_gradients,
        on_step_end=on_step_end,
        on_retry=rounding.begin_step,
        state=rounding,
        needs=NEEDS,
    )
