"""Delayed scaling of FP8: the maxima of the last steps, over all ranks, scale the present values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.train.objective import HEADS, Batch
from modelwright.train.precision.apply import ROLES, ModelPrecision, names_of_projections
from modelwright.train.technique import Runtime, Technique


@dataclass
class SyncAmaxHistory:
    """Appends the maxima of delayed scaling, over all ranks, to the history after each step. of_heads: names of the
    projections of heads, on whichever rank they are, in the same order on all.
    """

    formats: ModelPrecision
    agree: Callable[[Sequence[float]], Sequence[float]]
    of_heads: Sequence[str] = ()

    def synchronize(self) -> None:
        # All ranks list all layers of the whole model, whichever they hold: the maxima are exchanged by position.
        own, nothing = self.formats.delayed, [0.0] * len(ROLES)
        names = [*names_of_projections(self.formats.model.config), *self.of_heads]
        result = self.agree([value for name in names for value in (own[name].collect() if name in own else nothing)])
        for number, name in enumerate(names):
            if name in own:
                own[name].push(result[number * len(ROLES) : (number + 1) * len(ROLES)])

    def state_dict(self) -> dict[str, Any]:
        return {name: {role: list(one.past[role]) for role in ROLES} for name, one in self.formats.delayed.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.formats.delayed.items():
            for role in ROLES if name in state else ():
                one.past[role].extend(float(value) for value in state[name][role])


def amax_history(run: Runtime) -> Technique | None:
    """Returns None if no format uses delayed scaling."""
    if not run.formats.config.delays:
        return None
    world = run.mesh.world
    # Only the last stage of a pipeline has heads, but all ranks send maxima of the same names.
    own = [name for name in run.formats.delayed if name.startswith(HEADS)]
    of_heads = list(dict.fromkeys(name for names in world.gather_json(own) for name in names))
    history = SyncAmaxHistory(run.formats, lambda values: world.maxima(*values), of_heads)

    def on_batch(step: int, batch: Batch) -> Batch:
        run.formats.begin_step()
        return batch

    return Technique(
        name="amax_history",
        on_batch=on_batch,
        on_gradients=lambda update: history.synchronize(),
        on_retry=run.formats.begin_step,
        state=history,
        needs=frozenset(),
    )
