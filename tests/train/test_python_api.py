"""Names of the package that lead to the training loop; `examples/python/own_model.py` trains with them."""

import subprocess
import sys

import modelwright
from modelwright.train.build import train
from modelwright.train.job import TrainJob


def test_the_names_are_those_of_the_loop() -> None:
    assert modelwright.TrainJob is TrainJob
    assert modelwright.train_model is train


def test_the_docstring_names_what_users_call_first() -> None:
    assert modelwright.__doc__ is not None
    for name in ("mw.run(", "mw.finetune(", "mw.load(", "mw.compare(", "mw.serve("):
        assert name in modelwright.__doc__


def test_importing_the_package_does_not_import_pytorch() -> None:
    code = "import sys, modelwright; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
