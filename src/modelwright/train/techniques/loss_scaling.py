"""Loss scaling: adjusts the scale of the losses to overflows.

The finite check has agreed with all ranks, along every axis, whether something overflowed, so that all of them skip the
same updates and have the same scale (PyTorch's own scaler does not synchronize pipeline stages).
"""

from modelwright.train.precision.policy import LossScale, PrecisionConfig
from modelwright.train.technique import Runtime, Technique, Update


def loss_scaling(config: PrecisionConfig, run: Runtime) -> Technique | None:
    """Makes the run scale its losses, and adjusts the scale; None if losses are not scaled."""
    if not config.loss_scale.scales(uses_fp16=config.uses_fp16):
        return None
    run.scaler = scale = LossScale(config.loss_scale, run.model.config.num_parameters)

    def on_gradients(update: Update) -> None:
        # Right after the finite check: updates skipped later are not overflows.
        update.metrics["loss_scale"] = scale.value
        scale.update(update.step, update.skipped)

    return Technique(
        name="loss_scaling", on_gradients=on_gradients, state=scale, summary=scale.state_dict, needs=frozenset()
    )
