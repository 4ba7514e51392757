"""L2-SP: every weight is pulled toward its starting value, so that the model forgets less of its earlier abilities.

Li et al. 2018, Explicit inductive bias for transfer learning with convolutional networks
(https://arxiv.org/abs/1802.01483), here decoupled from the gradient as AdamW's weight decay is: after each update
w <- w + rate x strength x (start - w), so that the optimizer's second moments do not scale the pull.
"""

from collections.abc import Mapping
from typing import Any

import torch

from modelwright.core.artifacts import ArtifactError
from modelwright.train.technique import Runtime, StepInfo, Technique


class StartPull:
    """Keeps this rank's part of the starting weights. A checkpoint has only their range, which reveals another start:
    a run must resume with the model that it began with.
    """

    def __init__(self, strength: float, run: Runtime) -> None:
        self.strength = strength
        self.run = run
        self.start = {view.name: view.tensor.detach().clone() for view in run.parameters()}
        parts = [part for part in self.start.values() if part.numel()]
        # Over all ranks; a rank of a pipeline or of FSDP may hold no element at all.
        self.range = [
            run.max_over_ranks(max((float(part.max()) for part in parts), default=float("-inf"))),
            -run.max_over_ranks(max((-float(part.min()) for part in parts), default=float("-inf"))),
        ]

    @torch.no_grad()
    def on_step_end(self, info: StepInfo) -> None:
        if info.skipped:
            return
        for view in self.run.parameters():
            view.tensor.lerp_(self.start[view.name], info.learning_rate * self.strength)

    def state_dict(self) -> dict[str, Any]:
        return {"range": self.range}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["range"]) != self.range:
            raise ArtifactError(
                "l2_sp: the checkpoint belongs to a training from another model than the one that the run starts from; "
                "give the model that the run began with, or another --run-dir"
            )


def l2_sp(strength: float, run: Runtime) -> Technique | None:
    """See `StartPull`."""
    if not strength:
        return None
    # A run is laid out once (`LASTING_LAYOUT`) and loads its checkpoint later, so these weights are the starting ones.
    pull = StartPull(strength, run)
    return Technique(name="l2_sp", on_step_end=pull.on_step_end, state=pull, needs=frozenset())
