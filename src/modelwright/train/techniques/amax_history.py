"""Delayed scaling of FP8: the maxima of the last steps, over all ranks, scale the present values."""

from modelwright.precision.apply import SyncAmaxHistory
from modelwright.train.objective import Batch
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update
from modelwright.train.whole_model import HEADS


def amax_history(run: Runtime) -> Technique | None:
    """None if nothing uses delayed scaling."""
    if not run.formats.config.delays:
        return None
    world = run.mesh.world
    own = [name for name in run.formats.delayed if name.startswith(HEADS)]  # the last stage of a pipeline has them
    of_heads = list(dict.fromkeys(name for names in world.gather_json(own) for name in names))
    history = SyncAmaxHistory(run.formats, lambda values: world.maxima(*values), of_heads)

    def on_batch(step: int, batch: Batch) -> Batch:
        run.formats.begin_step()
        return batch

    def on_gradients(update: Update) -> None:
        history.synchronize()

    return Technique(
        name="amax_history",
        on_batch=on_batch,
        on_gradients=on_gradients,
        on_retry=run.formats.begin_step,
        state=history,
        needs=frozenset(),
    )
