"""Training with adapters: every layout gives the losses of one process, and a killed run ends with the same bits.

The base stays as it was to the bit; gradients, optimizer states and checkpoints are those of the adapters alone.
"""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run as tiny
import torch
from torch import Tensor

from distributed import RankError, run_distributed
from modelwright.core.errors import ArtifactError
from modelwright.core.records import column, read_records
from modelwright.core.rundir import StageDir
from modelwright.model.adapters import ADAPTER
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.train.checkpoint.sharded_tensors import read_index
from modelwright.train.state import load_best
from parallel.parity_run import Case, run_case, run_cases
from tolerances import TOLERANCES

EXACT = {"rtol": 1e-9, "atol": 1e-11}
ONCE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
LORA = {"r": 4, "target_modules": ["attention", "down_proj"]}
DORA = {"r": 3, "use_dora": True, "rank_pattern": {"o_proj": 2}}


def case(name: str, layout: dict[str, Any], lora: dict[str, Any] = DORA, **more: Any) -> Case:
    settings = {**ONCE, "lora": lora}
    return replace(Case(name=name, layout=layout, compute="fp64", steps=2, microbatches=2, settings=settings), **more)


CASES = [
    case("one-copy", {}),
    case("copies", {"shared_memory": False}, LORA),
    case("zero3", {"zero_stage": 3}),
    case("tensor", {"tensor": 2}),
    case("tensor-lora", {"tensor": 2}, LORA),
    case("tensor-whole-residual", {"tensor": 2, "sequence_parallel": False}),
    case("tensor-one-head", {"tensor": 2}, shape={"num_kv_heads": 1}),
    case("pipeline", {"pipeline": 2}),
    case("zero-bubble", {"pipeline": 2, "schedule": "zero_bubble"}, LORA),
    case("context", {"context": 2}, LORA),
]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [value for _, value in column(read_records(folder / "metrics.jsonl"), name)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Tensor]]]]:
    """The folder of all runs of two processes, and the final weights by rank and case."""
    folder = tmp_path_factory.mktemp("ranks")
    base = tmp_path_factory.mktemp("base")
    save_model(tiny.tiny_model(), base)
    layouts: dict[str, dict[str, Any]] = {"deferred-tensor": {"tensor": 2}, "deferred-zero3": {"zero_stage": 3}}
    deferred = [case(name, layout, compute="fp32", deferred=str(base)) for name, layout in layouts.items()]
    return folder, run_distributed(run_cases, 2, folder, [*CASES, *deferred])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same training in this process, once for all layouts of the same settings."""
    torch.set_num_threads(1)
    folder, done = tmp_path_factory.mktemp("single"), dict[str, tuple[Path, dict[str, Tensor]]]()

    def run(one: Case) -> tuple[Path, dict[str, Tensor]]:
        alone = replace(one, layout={}, deferred="", name="alone")
        key = f"case{sorted(done).index(repr(alone)) if repr(alone) in done else len(done)}"
        if repr(alone) not in done:
            done[repr(alone)] = folder / key / "alone", run_case(alone, folder / key)
        return done[repr(alone)]

    return run


def assert_same_training(one: Case, single: Any, ranks: Any, tolerance: Mapping[str, float]) -> None:
    folder, weights = single(one)
    for name in ("loss", "heldout_loss", "grad_norm", "model_flops"):
        found, wanted = (torch.tensor(losses(at, name), dtype=torch.float64) for at in (ranks[0] / one.name, folder))
        torch.testing.assert_close(found, wanted, **tolerance)
    first, second = (found[one.name] for found in ranks[1])
    assert first.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, **(TOLERANCES["fp32_trained"] if one.deferred else tolerance))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_losses_and_weights_are_those_of_one_process(single: Any, ranks: Any, one: Case) -> None:
    assert_same_training(one, single, ranks, EXACT)


@pytest.mark.parametrize("name", ["deferred-tensor", "deferred-zero3"])
def test_a_base_that_ranks_read_from_disk_trains_alike(single: Any, ranks: Any, name: str) -> None:
    assert_same_training(case(name, {}, compute="fp32", deferred="base"), single, ranks, TOLERANCES["fp32_loss"])


def test_a_pipeline_stage_without_adapters_is_refused(tmp_path: Path) -> None:
    empty = case("empty", {"pipeline": 2, "layers_per_stage": (0, 2)}, LORA)
    with pytest.raises(RankError, match=r"parallel\.layers_per_stage: a stage without layers has no adapters"):
        run_distributed(run_cases, 2, tmp_path, [empty])


def test_only_adapters_change_and_only_they_are_in_a_checkpoint(tmp_path: Path) -> None:
    model = tiny.tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tiny.run(tmp_path, tiny.settings(lora={"r": 4, "use_dora": True}), model=model)
    for name, weight in model.state_dict().items():
        assert ADAPTER in name or torch.equal(weight, before[name])
    index = read_index(tmp_path / "checkpoints" / "step-00000012")
    assert index["model"]
    assert all(ADAPTER in name for name in index["model"])
    moments = [name for name in index["training"] if "exp_avg" in name]
    assert len(moments) == 2 * len(index["model"])
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1


def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    changes = {"lora": {"r": 4, "use_dora": True, "lora_dropout": 0.2}}
    arguments = (tmp_path / "killed", 0, 3)
    ((*signals, last),) = run_distributed(_under_fire, 1, *arguments, changes, joins_world=False)
    assert signals.count(signal.SIGKILL) >= 2, signals
    assert last == 0
    tiny.run(tmp_path / "whole", tiny.settings(**changes))
    whole, killed = (tiny.final_weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    for metric in ("loss", "heldout_loss"):
        assert losses(tmp_path / "whole", metric) == losses(tmp_path / "killed", metric)


def _under_fire(folder: Path, seed: int, num_kills: int, changes: dict[str, Any]) -> list[int]:
    return tiny.train_under_fire(folder, seed, num_kills, **changes)


def test_a_checkpoint_does_not_resume_on_another_base(tmp_path: Path) -> None:
    changes = {"lora": {"r": 4}, "num_steps": 2}
    tiny.run(tmp_path, tiny.settings(**changes))
    other = Decoder(tiny.SHAPE)
    other.init_weights(1)
    with pytest.raises(ArtifactError, match="adapters of another model than the one that the run starts from"):
        tiny.run(tmp_path, tiny.settings(**{**changes, "num_steps": 4}), model=other)


def test_the_best_adapters_can_be_taken_back(tmp_path: Path) -> None:
    """As stages do where the last weights are not the best."""
    model = tiny.tiny_model()
    result = tiny.run(tmp_path, tiny.settings(lora={"r": 4}, num_steps=4), model=model)
    name = "blocks.0.ffn.up_proj.adapter.lora_B"
    trained = model.get_parameter(name).detach().clone()
    with torch.no_grad():
        model.get_parameter(name).zero_()
    load_best(model, StageDir(tmp_path), result.best)
    assert torch.equal(model.get_parameter(name), trained)
