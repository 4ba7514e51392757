"""Modelwright: from raw text to a served, monitored language model, with every technique measured.

`TrainJob` and `train_model` are the way to train from Python, with a model, an objective and techniques of one's own:

>>> import tempfile
>>> from pathlib import Path
>>> from modelwright import TrainJob, train_model
>>> import torch
>>> from modelwright.core.rundir import StageDir
>>> from modelwright.data.rows.batch import TokenBatch
>>> from modelwright.model.config import ModelConfig
>>> from modelwright.model.decoder import Decoder
>>> from modelwright.objectives.next_token import NextToken
>>> from modelwright.train.precision.policy import PrecisionConfig
>>> from modelwright.train.config import TrainConfig

>>> class Counting:  # rows of consecutive numbers: the next token is the last one plus 1
...     num_batches_per_epoch = 1
...
...     def batch(self, index, *, rank=0, world_size=1):
...         positions_BT = torch.arange(16).repeat(4 // world_size, 1)
...         ids_BT = (positions_BT + torch.arange(len(positions_BT))[:, None] + rank) % 32
...         segments_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
...         return TokenBatch(
...             input_ids_BT=ids_BT, labels_BT=(ids_BT + 1) % 32, positions_BT=positions_BT, segments_BT=segments_BT
...         )

>>> shape = ModelConfig(
...     vocab_size=32, max_seq_len=16, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=2, ffn_dim=64, head_dim=16
... )
>>> model = Decoder(shape)
>>> model.init_weights(0)
>>> config = TrainConfig(
...     num_steps=30, batch_tokens=64, learning_rate=1e-2, precision=PrecisionConfig(policy="fp32")
... )
>>> with tempfile.TemporaryDirectory() as folder:
...     job = TrainJob(
...         model=model, objective=NextToken(Counting()), config=config, stage=StageDir(Path(folder)), num_steps=30
...     )
...     result = train_model(job)
>>> result.num_steps, result.loss < 1.0
(30, True)

Started by `torchrun`, the same job is trained over all processes: `with join_world() as world: train_model(job, world)`
(`modelwright.parallel.mesh`); `TrainJob.parallel` lays it out.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modelwright.core import VERSION
from modelwright.core.library_environment import prepare

if TYPE_CHECKING:
    from modelwright.core.errors import ConfigError, ModelwrightError
    from modelwright.recipes.cleaning import clean
    from modelwright.recipes.models import ComparedModels, Model, compare, evaluate, export, load, serve
    from modelwright.recipes.runs import Run, align, finetune, run
    from modelwright.recipes.show import show
    from modelwright.recipes.watch import TrainingStep
    from modelwright.train.build import train as train_model
    from modelwright.train.job import TrainJob

__version__ = VERSION
__all__ = [
    "ComparedModels",
    "ConfigError",
    "Model",
    "ModelwrightError",
    "Run",
    "TrainJob",
    "TrainingStep",
    "__version__",
    "align",
    "clean",
    "compare",
    "evaluate",
    "export",
    "finetune",
    "load",
    "run",
    "serve",
    "show",
    "train_model",
]  # fmt: skip

_EXPORTS = {
    "TrainJob": ("modelwright.train.job", "TrainJob"),
    "train_model": ("modelwright.train.build", "train"),
    "clean": ("modelwright.recipes.cleaning", "clean"),
    "TrainingStep": ("modelwright.recipes.watch", "TrainingStep"),
    "show": ("modelwright.recipes.show", "show"),
    **{name: ("modelwright.core.errors", name) for name in ("ConfigError", "ModelwrightError")},
    **{name: ("modelwright.recipes.runs", name) for name in ("Run", "align", "finetune", "run")},
    **{
        name: ("modelwright.recipes.models", name)
        for name in ("ComparedModels", "Model", "compare", "evaluate", "export", "load", "serve")
    },
}
"""Imported when they are asked for: they import PyTorch. `modelwright.train` is the package of that name."""

prepare(os.environ, is_too_late="torch" in sys.modules)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'modelwright' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)


class _Callable(ModuleType):
    """`modelwright.evaluate` and `modelwright.serve`: packages that are called as the functions of the same name."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*args, **settings)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EXPORTS and isinstance(value, ModuleType):  # set by the import of the package
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
