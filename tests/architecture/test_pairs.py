"""Every pair of switches of a training run either trains two steps or is refused with one clear error.

Refusals are checked without training. The pairs that are left are trained many at a time, by a covering array: every
pair is in one of its runs. The switches are checked against the configuration: a new setting that can be switched on
must be listed here.
"""

import dataclasses
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from covering_array import Pair, covering_array, pairs_of
from distributed import run_distributed
from modelwright.core.config import ConfigError, is_constant, parse
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train import parallelize, trainer
from modelwright.train.config import TrainConfig
from training_switches import BASE, LAYOUTS, STRATEGIES, SWITCHES, dotted, refusal, train

WITHIN_A_SWITCH = {
    "num_tokens": "another unit for the length",
    "num_epochs": "another unit for the length",
    "schedule": "the shape of the learning rate, a function of the step",
    "adaptive_clip": "figures of adaptive clipping",
    "precision.overrides": "another format for a part, of those that policies give",
    "precision.fp8": "figures of FP8",
    "precision.loss_scale": "figures of the loss scale, which FP16 switches on",
    "activation_checkpointing.flops_per_byte": "a figure of the machine",
    "gradient_sync.topk_quantized": "figures of three-level compression",
    "checkpoint_every_minutes": "another unit for the checkpoints",
    "lora.use_rslora": "a factor of the adapters",
    "lora.base_format": "tensor parallelism takes it for some widths only; trained under layouts in test_adapters.py",
    "batching": "the order of rows, which the loader of a stage gives and no step knows",
}
"""Settings, or groups of them, that a switch of the list brings with it, and why they need no switch of their own."""


def leaves(cls: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and default of every setting."""
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        hint = hints[entry.name]
        if is_constant(entry):
            continue  # no file and no option sets it
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{path}{entry.name}.")
        else:
            yield f"{path}{entry.name}", hint, getattr(cls(num_steps=1) if cls is TrainConfig else cls(), entry.name)


def test_every_setting_that_can_be_switched_on_is_listed() -> None:
    listed = {name for settings in SWITCHES.values() for name in dotted(settings)} | set(dotted(BASE))
    for name, hint, default in leaves(TrainConfig):
        is_choice = hint is bool or typing.get_origin(hint) is typing.Literal
        can_be_switched_on = is_choice or (isinstance(default, (int, float)) and default == 0)
        groups = [".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 2)]
        explained = any(group in WITHIN_A_SWITCH for group in groups)
        assert not can_be_switched_on or name in listed or explained, f"{name}: add a switch for it to SWITCHES"
    names = [name for name, _, _ in leaves(TrainConfig)]
    for group in WITHIN_A_SWITCH:
        assert any(name == group or name.startswith(f"{group}.") for name in names), f"{group} is gone"


class Refusals:
    """Which switches a layout refuses, by the checks that a run makes before it builds anything."""

    def __init__(self, layout: str = "", *, num_processes: int = 1) -> None:
        self.parallel = parse(ParallelConfig, LAYOUTS.get(layout, {}))
        self.num_processes = num_processes

    def text(self, switches: Sequence[str]) -> str:
        """Why these switches are refused, or ""."""
        return refusal(switches, self.parallel, num_processes=self.num_processes)

    def can_combine(self, switches: Sequence[str]) -> bool:
        """Whether the switches train together, without one of them undoing a setting of another."""
        return not contradicts(switches) and not self.text(switches)


def contradicts(switches: Sequence[str]) -> bool:
    """Whether two of the switches give one setting different values."""
    values: dict[str, Any] = {}
    for name in switches:
        for key in dotted(SWITCHES[name]):
            value = reduce(lambda group, part: group[part], key.split("."), SWITCHES[name])
            if values.setdefault(key, value) != value:
                return True
    return False


def train_all(world: World, rows: list[list[str]], layout: str, folder: Path) -> None:
    """Train every row of switches; the error of a row that fails names its switches."""
    torch.set_num_threads(1)
    eager = partial(parallelize.compile_each_block, backend="eager")
    with (
        mock.patch.object(parallelize, "compile_each_block", eager),
        mock.patch.object(trainer, "give_back_memory"),  # a garbage collection, which takes longer than the run
        warnings.catch_warnings(),
    ):
        # torch.compile reads .grad of tensors that have none.
        warnings.filterwarnings("ignore", module="torch")
        for number, switches in enumerate(rows):
            try:
                train(switches, folder / str(number), world, layout)
            except Exception as error:
                raise AssertionError(f"{' + '.join([layout, *switches])}: does not train: {error!r}") from error
    torch.compiler.reset()  # other tests compile the same blocks


def assert_clear(text: str) -> None:
    """A refusal names the setting first, says why, and what to do, on one line."""
    key, _, why = text.partition(": ")
    assert why, text
    assert "\n" not in text
    root = key.split(".")[0]
    assert root == "parallel" or root in {entry.name for entry in dataclasses.fields(TrainConfig)}, text


def rows_to_train(refusals: Refusals, switches: Sequence[str], pairs: Iterable[Pair]) -> list[list[str]]:
    """A covering array of the pairs that train. Asserts that all others are refused clearly."""
    trains = [name for name in switches if refusals.can_combine([name])]
    for pair in map(sorted, pairs):
        if text := refusals.text(pair):
            assert_clear(text)
    required = [pair for pair in pairs if refusals.can_combine(sorted(pair))]
    return covering_array(trains, required, refusals.can_combine)


@pytest.mark.slow
def test_pairs_of_switches_train_or_are_refused(tmp_path: Path) -> None:
    names = [name for name in SWITCHES if name not in STRATEGIES]
    rows = rows_to_train(Refusals(), names, pairs_of(names))
    train_all(single(), rows, "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_switch_and_a_layout_train_or_are_refused(layout: str, tmp_path: Path) -> None:
    """On two processes. A strategy does little on one, so its pairs with switches are trained here, too."""
    refusals = Refusals(layout, num_processes=2)
    pairs = {pair for pair in pairs_of(SWITCHES) if pair & STRATEGIES.keys()} if layout == "shared memory" else set()
    for name in SWITCHES:
        if text := refusals.text([name]):
            assert_clear(text)
    run_distributed(train_all, 2, rows_to_train(refusals, list(SWITCHES), pairs), layout, tmp_path)


def test_a_refused_pair_does_not_train(tmp_path: Path) -> None:
    """The checks before a run are those of the run itself: what they refuse is refused there, with the same text."""
    pair = ["Hogwild", "Muon"]
    with pytest.raises(ConfigError) as refused:
        train(pair, tmp_path, single())
    assert str(refused.value) == Refusals().text(pair)


def test_most_pairs_train() -> None:
    """A rule that refused everything would pass the other tests. What this processor cannot train alone, such as exact
    FP32 products by oneDNN where AMX rounds them, is no refused pair.
    """
    names = ["BF16", "recomputed", "microbatches", "AdamW, INT8 states", "loss spikes", "balanced tokens", "evaluation"]
    assert Refusals().can_combine(names)
    pairs = pairs_of([name for name in SWITCHES if Refusals().can_combine([name])])
    refused = [pair for pair in pairs if Refusals().text(sorted(pair))]
    assert len(refused) < 250, f"{len(refused)} of {len(pairs)} pairs are refused"
