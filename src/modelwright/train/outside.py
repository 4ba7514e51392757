"""Techniques and objectives of other packages, and guards for techniques that are not in the list of `build.py`.
docs/extending.md shows how to write one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelwright.core import compatibility as traits
from modelwright.core.config import ConfigError, derive_seed, dump
from modelwright.core.extensions import NoSettings, configured
from modelwright.ops.dtensor import TensorView
from modelwright.train.objective import Batch, Objective, generator_states, seed_generators
from modelwright.train.technique import Request, Runtime, StepInfo, Technique, TechniqueBuilder, Update

TECHNIQUES_GROUP = "modelwright.techniques"
"""Entry points of other packages: each a `TechniqueSpec`."""


@dataclass(frozen=True, kw_only=True)
class TechniqueSpec:
    """A technique that a training names in its setting `techniques`."""

    build: Callable[[Any, Runtime], Technique | None]
    """Builds the technique from its settings for one layout; None where it has nothing to do."""
    config: type = NoSettings
    """The dataclass of its settings."""
    needs: frozenset[str] = traits.UNDECLARED
    """Properties of a run that it relies on (`core/compatibility.py`). They replace those of the technique that `build`
    returns, because they have to be known before a run begins."""
    breaks: frozenset[str] = frozenset()
    """Properties of a run that it removes."""


OBJECTIVES_GROUP = "modelwright.objectives"
"""Entry points of other packages: each an `ObjectiveSpec`."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """An objective that a training stage names in its setting `objective`."""

    build: Callable[[Any, Any], Objective]
    """Builds the objective from its settings and the stage's `StageInputs` (`pipeline/stage.py`)."""
    config: type = NoSettings
    """The dataclass of its settings."""
    needs: frozenset[str] = traits.UNDECLARED | Objective.needs
    """Properties of a run that it relies on, those of the objective that `build` returns included."""


def named_objectives(objective: Mapping[str, Any]) -> dict[str, tuple[ObjectiveSpec, Any]]:
    """Returns the objective of another package and its settings, by name; empty for a stage with its own."""
    return configured(OBJECTIVES_GROUP, ObjectiveSpec, objective, "objective")


def named_settings(techniques: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the techniques' settings as plain dicts by name, completed with defaults."""
    found = configured(TECHNIQUES_GROUP, TechniqueSpec, techniques, "techniques")
    return {name: dump(settings) for name, (_, settings) in found.items()}


def named_features(techniques: Mapping[str, Any]) -> list[traits.Feature]:
    """Returns the properties of a run that the named techniques need and break. techniques: settings by name."""
    found = configured(TECHNIQUES_GROUP, TechniqueSpec, techniques, "techniques")
    return [
        traits.feature(f"techniques.{name}", needs=spec.needs, breaks=spec.breaks) for name, (spec, _) in found.items()
    ]


def named_techniques(techniques: Mapping[str, Any]) -> list[TechniqueBuilder]:
    """Returns builders of the named techniques, in their order."""
    found = configured(TECHNIQUES_GROUP, TechniqueSpec, techniques, "techniques")
    # The key names the setting in errors, and the technique's state in checkpoints.
    return [partial(_build_named, f"techniques.{name}", spec, settings) for name, (spec, settings) in found.items()]


def _build_named(name: str, spec: TechniqueSpec, settings: Any, run: Runtime) -> Technique | None:
    technique = spec.build(settings, run)
    if technique is None:
        return None
    # The run was checked against the spec's needs before it began, so they must already say that gradients are used.
    if "on_gradients" in technique.hooks and traits.WHOLE_GRADIENTS not in spec.needs:
        raise ConfigError(
            f"{name}: acts on gradients; let its TechniqueSpec declare that it needs WHOLE_GRADIENTS, too"
        )
    return replace(technique, name=name, needs=spec.needs, breaks=spec.breaks)


def guarded(build: TechniqueBuilder) -> TechniqueBuilder:
    """Wraps a builder so that a technique that does not know the layout acts correctly under any, or is refused.

    The technique needs `WHOLE_GRADIENTS` if it acts on gradients: under a setting that leaves none after backward it
    would silently do nothing. PyTorch's default generators are seeded for each of its calls, alike on all ranks that
    hold the same rows, weights or gradients, so noise for whole tensors is the same everywhere, as on one process.
    Noise for parts of tensors would depend on the layout, and weights that several processes share would be changed by
    each of them; both are refused.
    """

    def build_guarded(run: Runtime) -> Technique | None:
        technique = build(run)
        if technique is None:
            return None
        needs = technique.needs | ({traits.WHOLE_GRADIENTS} if "on_gradients" in technique.hooks else frozenset[str]())
        guard = _Guard(replace(technique, needs=needs), run)
        return replace(guard.technique, **{moment: getattr(guard, moment) for moment in technique.hooks})

    return build_guarded


@dataclass(frozen=True)
class _Guard:
    """The guarded hooks of a technique, see `guarded`."""

    technique: Technique
    run: Runtime

    def seed(self, moment: str, *stream: int) -> list[Tensor]:
        """Seed PyTorch's default generators; returns their states."""
        device = self.run.mesh.world.device
        seed_generators(derive_seed(self.run.seed, "technique", self.technique.name, moment, *stream), device)
        return generator_states(device)

    def on_batch(self, step: int, batch: Batch) -> Batch:
        self.seed("on_batch", step, self.run.mesh.data.rank)  # other rows, other noise
        return self.technique.on_batch(step, batch)

    def on_gradients(self, update: Update) -> None:
        states = self.seed("on_gradients", update.step)
        self.technique.on_gradients(update)
        if traits.UNDIVIDED_GRADIENTS not in self.technique.needs:
            self.refuse_noise(states, update.gradients)

    def on_step_end(self, info: StepInfo) -> Request:
        name, needs, weights = self.technique.name, self.technique.needs, list(self.run.replica.names)
        # Autograd's version counters rise with every change in place, which tells a change without comparing values.
        states, versions = self.seed("on_step_end", info.step), [weight._version for weight in weights]
        request = self.technique.on_step_end(info)
        are_shared = traits.OWN_WEIGHTS not in needs and traits.OWN_WEIGHTS in self.run.strategy.breaks
        if are_shared and versions != [weight._version for weight in weights]:
            raise ConfigError(
                f"{name}: changes weights that several processes share, once on each of them; let it declare that it "
                "needs OWN_WEIGHTS"
            )
        if traits.UNDIVIDED_GRADIENTS not in needs:
            self.refuse_noise(states, self.run.parameters())
        return request

    def refuse_noise(self, states: list[Tensor], views: Sequence[TensorView]) -> None:
        """Raise `ConfigError` if the technique has drawn from the generators for parts of the model."""
        mesh = self.run.mesh
        if mesh.world.size == 1:
            return
        # Ranks do not agree on this, which would cost another message in every step: a rank that has no part of any
        # tensor draws nothing, and ends when the others do.
        drew = not all(map(torch.equal, states, generator_states(mesh.world.device)))
        if drew and (mesh.pipeline.size > 1 or any(not view.is_whole for view in views)):
            raise ConfigError(
                f"{self.technique.name}: draws random numbers from PyTorch's default generator where each rank has "
                "parts of the model, so that they depend on the layout; draw them by view.random_like(seed, step), or "
                "let it declare that it needs UNDIVIDED_GRADIENTS"
            )
