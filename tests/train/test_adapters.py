"""Training with adapters: every layout gives the losses of one process, and a killed run ends with the same bits.

The base stays as it was to the bit; gradients, optimizer states and checkpoints are those of the adapters alone.
"""

import copy
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run as tiny
import torch
from torch import Tensor, nn

from distributed import RankError, run_distributed
from modelwright.core.artifacts import ArtifactError, StageDir
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.adapters import ADAPTER, merge_adapters
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model
from modelwright.objectives.next_token import NextToken
from modelwright.train.checkpoint.files import read_index
from modelwright.train.job import load_best
from modelwright.train.objective import Objective, Terms
from parallel.parity_run import Case, run_case, run_cases
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-9, "atol": 1e-11}
ONCE = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
LORA = {"r": 4, "target_modules": ["attention", "down_proj"]}
NF4 = {"r": 4, "base_format": "nf4", "use_dora": True, "target_modules": ["q_proj", "o_proj", "ffn"]}
WIDE = {"head_dim": 32, "ffn_dim": 128}
"""Projections that two ranks divide into whole runs of a packed weight."""
DORA = {"r": 3, "use_dora": True, "rank_pattern": {"o_proj": 2}}


def case(name: str, layout: dict[str, Any], lora: dict[str, Any] = DORA, **more: Any) -> Case:
    settings = {**ONCE, "lora": lora}
    return replace(Case(name=name, layout=layout, compute="fp64", steps=2, microbatches=2, settings=settings), **more)


CASES = [
    case("one-copy", {}),
    case("copies", {"shared_memory": False}, LORA),
    case("zero3", {"zero_stage": 3}),
    case("tensor", {"tensor": 2}),
    case("tensor-whole-residual", {"tensor": 2, "sequence_parallel": False}, LORA),
    case("tensor-one-head", {"tensor": 2}, shape={"num_kv_heads": 1}),
    case("pipeline", {"pipeline": 2}),
    case("zero-bubble", {"pipeline": 2, "schedule": "zero_bubble"}, LORA),
    case("context", {"context": 2}, LORA),
    case("zero3-nf4", {"zero_stage": 3}, NF4),
    case("tensor-nf4", {"tensor": 2}, NF4, shape=WIDE),
    case("tensor-one-head-int8", {"tensor": 2}, {**NF4, "base_format": "int8"}, shape={**WIDE, "num_kv_heads": 1}),
]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [value for _, value in column(read_records(folder / "metrics.jsonl"), name)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Tensor]]]]:
    """The folder of all runs of two processes, and the final weights by rank and case."""
    folder = tmp_path_factory.mktemp("ranks")
    base = tmp_path_factory.mktemp("base")
    save_model(tiny.tiny_model(), base)
    layouts: dict[str, dict[str, Any]] = {"deferred-tensor": {"tensor": 2}}
    deferred = [case(name, layout, compute="fp32", deferred=str(base)) for name, layout in layouts.items()]
    deferred.append(case("deferred-nf4", {"zero_stage": 3}, NF4, compute="fp32", deferred=str(base)))
    deferred.append(case("bf16-zero3-nf4", {"zero_stage": 3}, NF4, compute="bf16"))
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


@pytest.mark.parametrize(("name", "lora"), [("deferred-tensor", DORA), ("deferred-nf4", NF4)])
def test_a_base_that_ranks_read_from_disk_trains_alike(single: Any, ranks: Any, name: str, lora: Any) -> None:
    one = case(name, {}, lora, compute="fp32", deferred="base")
    assert_same_training(one, single, ranks, TOLERANCES["fp32_loss"])


def test_products_in_bf16_of_a_packed_base_that_ranks_share(single: Any, ranks: Any) -> None:
    """Codes and scales are gathered as they are; only what products read is rounded."""
    folder, _ = single(case("bf16-zero3-nf4", {}, NF4, compute="bf16"))
    found, wanted = (torch.tensor(losses(at)) for at in (ranks[0] / "bf16-zero3-nf4", folder))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)


def test_runs_of_a_packed_weight_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"lora\.base_format: the 32 inputs of a projection do not divide into whole runs"
    ):
        run_distributed(run_cases, 2, tmp_path, [case("cut", {"tensor": 2}, NF4)])


def test_a_pipeline_stage_without_adapters_is_refused(tmp_path: Path) -> None:
    empty = case("empty", {"pipeline": 2, "layers_per_stage": (0, 2)}, LORA)
    with pytest.raises(
        RankError, match=r"parallel\.layers_per_stage: a stage without layers would hold only frozen weights"
    ):
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


def test_a_packed_base_learns_as_well_in_a_seventh_of_the_memory(tmp_path: Path) -> None:
    """QLoRA's loss is within 1% of LoRA's, on a base that has learned something."""
    base, results, bytes_of = tiny.tiny_model(), {}, {}
    before = tiny.run(tmp_path / "base", tiny.settings(**ONCE, num_steps=6), model=base).heldout_loss
    for kind in ("full", "int8", "nf4"):
        model, lora = copy.deepcopy(base), {"r": 8, "base_format": kind}
        settings = tiny.settings(**ONCE, lora=lora, num_steps=16)
        results[kind] = tiny.run(tmp_path / kind, settings, model=model).heldout_loss
        frozen = [p for n, p in model.named_parameters() if "proj" in n and ADAPTER not in n]
        assert not any(parameter.requires_grad for parameter in frozen)
        bytes_of[kind] = sum(parameter.nbytes for parameter in frozen)
        merge_adapters(model)
        assert all(parameter.is_floating_point() for parameter in model.parameters())
        assert model.state_dict().keys() == tiny.tiny_model().state_dict().keys()
    assert results["full"] < before - 0.08
    assert results["int8"] == pytest.approx(results["full"], rel=0.002)
    assert results["nf4"] == pytest.approx(results["full"], rel=0.01)
    assert results["nf4"] != results["int8"] != results["full"]
    # rows of 32 have half a run each, so that scales weigh twice as much as in wide models
    assert bytes_of["nf4"] / bytes_of["full"] == pytest.approx((0.5 + 4 / 32) / 4, rel=0.1)
    assert bytes_of["int8"] / bytes_of["full"] == pytest.approx((1 + 4 / 32) / 4, rel=0.1)


def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    changes = {"lora": {"r": 4, "use_dora": True, "lora_dropout": 0.2, "base_format": "nf4"}}
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


@dataclass
class WithHead(Objective):
    """Next tokens, and a head of its own."""

    inner: NextToken

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return {"value": nn.Linear(config.model_dim, 1)}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return self.inner.batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {**self.inner.weights(batch), "value": (batch.segments_BT >= 0).sum()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        value_BT = (model.head_output("value", output)[..., 0] - 1.0).square() * (batch.segments_BT >= 0)
        return Terms({**self.inner.losses(output, batch, model).losses, "value": value_BT.sum()})


def test_the_objective_s_head_is_trained_beside_the_adapters(tmp_path: Path) -> None:
    model = tiny.tiny_model()
    objective = WithHead(NextToken(tiny.Rows()))
    tiny.run(tmp_path, tiny.settings(lora={"r": 2}, num_steps=4), model=model, objective=objective)
    names = set(read_index(tmp_path / "checkpoints" / "step-00000004")["model"])
    assert {"heads.value.weight", "heads.value.bias"} < names
    assert all(ADAPTER in name or name.startswith("heads.") for name in names)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1


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
