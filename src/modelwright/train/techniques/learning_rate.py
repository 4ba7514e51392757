"""The scheduled learning rate, set before forward: it depends on the step alone."""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from modelwright.train.objective import Batch
from modelwright.train.optim.schedule import ScheduleConfig, rate_factor
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique


@dataclass(eq=False)
class LearningRate:
    """Sets `peak` times the schedule's factor in all parameter groups. Its state is the rate of the last step, which
    techniques that act earlier can read in the groups.
    """

    optimizer: Optimizer
    config: ScheduleConfig
    peak: float
    num_steps: int

    def on_batch(self, step: int, batch: Batch) -> Batch:
        rate = self.peak * rate_factor(self.config, step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.optimizer.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A new optimizer has the first rate, which earlier techniques would read in the first step after a resume.
        for group in self.optimizer.param_groups:
            group["lr"] = state["rate"]


def learning_rate(config: ScheduleConfig, run: Runtime, *, peak: float) -> Technique:
    """peak: the highest learning rate of the schedule."""
    rate = LearningRate(run.replica.optimizer, config, peak=peak, num_steps=run.num_steps)
    return Technique(name="learning_rate", on_batch=rate.on_batch, state=rate, needs=frozenset())
