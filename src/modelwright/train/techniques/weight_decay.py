"""Weight decay that is lowered while gradients are large."""

from typing import Any

from torch.optim import Optimizer

from modelwright.train.optim.schedule import WeightDecayScheduleConfig
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update


class WeightDecaySchedule:
    """Lowers the weight decay of all parameter groups while gradients are large."""

    def __init__(self, optimizer: Optimizer, config: WeightDecayScheduleConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        # Groups differ: norms do not decay.
        self.usual = [group["weight_decay"] for group in optimizer.param_groups]
        self.low = False

    def on_gradients(self, update: Update) -> None:
        if update.skipped:
            return
        self.low = self.config.is_low(update.grad_norm, self.low)
        factor = self.config.factor if self.low else 1.0
        for group, usual in zip(self.optimizer.param_groups, self.usual, strict=True):
            group["weight_decay"] = factor * usual
        update.metrics["decay_factor"] = factor

    def state_dict(self) -> dict[str, Any]:
        return {"low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.low = bool(state["low"])


def dynamic_weight_decay(config: WeightDecayScheduleConfig, run: Runtime) -> Technique | None:
    if not config.grad_norm_threshold:
        return None
    decay = WeightDecaySchedule(run.replica.optimizer, config)
    return Technique(
        name="dynamic_weight_decay",
        on_gradients=decay.on_gradients,
        state=decay,
        belongs_to_weights=True,
        needs=frozenset(),
    )
