"""Delayed scaling of FP8: the maxima of the last steps, over all ranks, scale the present values."""

from modelwright.train.objective import HEADS, Batch
from modelwright.train.precision.apply import SyncAmaxHistory
from modelwright.train.technique import Runtime, Technique


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
