"""Modelwright: from raw text to a served, monitored language model, with every technique measured.

    import modelwright as mw

    run = mw.run("tiny", name="mine")  # the folder that `modelwright run tiny --name mine` makes
    tuned = mw.finetune(run.path, [{"prompt": "Box 1?", "completion": "Red."}, ...], lora=True)
    model = mw.load(tuned.path)  # or a Hugging Face folder
    print(model.chat("Box 1?"), mw.compare(run.path, tuned.path, "heldout.jsonl"))
    with mw.serve(tuned.path) as server:
        print(server.url)  # an OpenAI-compatible API

Settings are named as on the command line. `docs/python.md` is the guide. `TrainJob` and `train_model` train a model, an
objective and techniques of one's own (`examples/python/own_model.py`).
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modelwright.core import VERSION
from modelwright.core.library_environment import prepare

if TYPE_CHECKING:
    from modelwright.core.config import ConfigError, ModelwrightError
    from modelwright.recipes.cleaning import clean
    from modelwright.recipes.models import (
        ComparedModels,
        Model,
        Run,
        align,
        compare,
        evaluate,
        export,
        finetune,
        load,
        run,
        serve,
    )
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

# Imported when they are asked for, because most of them import PyTorch. The name `train` is that of the package.
_EXPORTS = {
    "TrainJob": ("modelwright.train.job", "TrainJob"),
    "train_model": ("modelwright.train.build", "train"),
    "clean": ("modelwright.recipes.cleaning", "clean"),
    "TrainingStep": ("modelwright.recipes.watch", "TrainingStep"),
    "show": ("modelwright.recipes.show", "show"),
    **{name: ("modelwright.core.config", name) for name in ("ConfigError", "ModelwrightError")},
    **{name: ("modelwright.recipes.models", name) for name in ("Run", "align", "finetune", "run")},
    **{
        name: ("modelwright.recipes.models", name)
        for name in ("ComparedModels", "Model", "compare", "evaluate", "export", "load", "serve")
    },
}

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
