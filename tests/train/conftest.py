"""The tiny run as a module, for tests of the loop; one thread, so that figures repeat."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TINY_RUN = Path(__file__).with_name("tiny_run.py")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever tests before this one have left: the number of threads decides last bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("tiny_run", TINY_RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_run"] = module
    spec.loader.exec_module(module)
    return module
