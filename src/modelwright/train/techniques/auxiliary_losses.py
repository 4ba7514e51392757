"""Terms of the loss that the model's own layers add (`model/head_selection.py`): their scale, and their metrics."""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import torch

from modelwright.model.head_selection import auxiliary_losses as losses_of
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, Technique, Update


def auxiliary_losses(run: Runtime) -> Technique | None:
    """Returns None for a model without such layers. Acts late, on the batch as the model will see it."""
    mesh, layers = run.mesh, losses_of(run.model)
    names = sorted({name for names in mesh.world.gather_json([layer.name for layer in layers]) for name in names})
    if not names:
        return None
    num_tokens = 0.0

    def on_batch(step: int, batch: Batch) -> Batch:
        nonlocal num_tokens
        own_tokens = float((batch.segments_BT >= 0).sum()) * mesh.speaks_for_rows
        (num_tokens,) = mesh.world.sums([own_tokens])
        for layer in layers:
            # Layers add their terms inside the model, so the loss scale and the normalizer must reach them there.
            layer.begin_step(run.scaler.value / max(1.0, num_tokens), mesh.world.device)
        return batch

    def on_gradients(update: Update) -> None:
        sums = dict.fromkeys(names, 0.0)
        totals = torch.stack([layer.total for layer in layers]).tolist() if layers else []
        for layer, total in zip(layers, totals, strict=True):
            sums[layer.name] += layer.weight * total * mesh.tensor.is_first
        for name, total in zip(names, mesh.world.sums(list(sums.values())), strict=True):
            update.metrics[f"auxiliary_loss/{name}"] = total / max(1.0, num_tokens)

    def on_retry() -> None:
        for layer in layers:
            layer.forget()

    return Technique(
        name="auxiliary_losses",
        on_batch=on_batch,
        on_gradients=on_gradients,
        on_retry=on_retry,
        needs=frozenset(),
    )
