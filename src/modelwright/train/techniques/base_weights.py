"""Adapters: a checkpoint has the trained weights only, so a run may resume only on the base that it began with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelwright.core.artifacts import ArtifactError
from modelwright.model.adapters import adapter_parameters
from modelwright.train.technique import Runtime, Technique


@dataclass(eq=False)
class BaseIdentity:
    """Keeps the fingerprint of the base in the checkpoint. Raises `ArtifactError` on another base."""

    fingerprint: str

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise ArtifactError(
                "lora: the checkpoint has adapters of another model than the one that the run starts from; give the "
                "model that the run began with, or another --run-dir"
            )


def base_weights(run: Runtime) -> Technique | None:
    """Returns None for a model without adapters."""
    shape, adapters = run.model.config, run.model.adapters
    if not adapters.r:
        return None
    num_trained, kept = adapter_parameters(shape, adapters), adapters.base_format
    run.note(f"adapters: {num_trained:,} parameters are trained, {shape.num_parameters:,} stay frozen ({kept})")
    return Technique(name="base_weights", state=BaseIdentity(run.model.base_fingerprint), needs=frozenset())
