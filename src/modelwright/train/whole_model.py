"""The whole model on every rank, for rollouts while it is laid out over several ranks."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from modelwright.model.adapters import attach_adapters
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.full_state import restore_weights, whole_weights
from modelwright.parallel.mesh import Mesh, World, build_mesh, single
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig

HEADS = "heads."
"""Prefix of the parameter names of `Decoder.heads`."""


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The layout of the model in training, for objectives that generate with it.

    own_modules: those of the objective, which are part of the whole model.
    """

    mesh: Mesh
    precision: PrecisionConfig
    own_modules: Callable[[ModelConfig], Mapping[str, nn.Module]] = lambda config: {}

    @property
    def world(self) -> World:
        """All ranks that make one update together."""
        return self.mesh.world

    @contextmanager
    def whole_model(self, model: Decoder) -> Generator[Decoder]:
        """The whole model, with the present weights and number formats of `model`, this rank's part of it.

        Where every rank holds all weights this is `model` itself. Otherwise it is a copy for the time of the block:
        weights are gathered one at a time, by all ranks together, so that a rank needs memory for the whole model but
        not for gradients or optimizer states of it. Do not change its weights.
        """
        if self.mesh.is_only_data_parallel:
            yield model
            return
        with torch.device("meta"):
            whole = Decoder(model.config)
            for name, module in self.own_modules(model.config).items():
                whole.heads[name] = module
            # `attach_adapters` would compute the fingerprint of the base from its values, which a skeleton lacks.
            whole.base_fingerprint = model.base_fingerprint
            attach_adapters(whole, model.adapters, seed=0)
        names = {name for name, _ in whole.named_parameters()}
        restore_weights(whole, (pair for pair in whole_weights(model, self.mesh) if pair[0] in names))
        whole.requires_grad_(False)
        if model.ends.stream_dtype is not None:  # while a model is evaluated in FP32 it has no formats
            ModelPrecision(whole, self.precision)
        yield whole


def one_process() -> ModelLayout:
    """The layout of a model that this process has alone, in FP32."""
    return ModelLayout(mesh=build_mesh(single(), ParallelConfig()), precision=PrecisionConfig(policy="fp32"))
