"""Training from Python: the example in the package's docstring runs as it stands."""

import doctest
import subprocess
import sys

import modelwright
from modelwright.train.build import train
from modelwright.train.job import TrainJob


def test_the_example_runs() -> None:
    result = doctest.testmod(modelwright, optionflags=doctest.FAIL_FAST)
    assert result.attempted > 10
    assert result.failed == 0


def test_the_names_are_those_of_the_loop() -> None:
    assert modelwright.TrainJob is TrainJob
    assert modelwright.train_model is train


def test_importing_the_package_does_not_import_pytorch() -> None:
    code = "import sys, modelwright; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
