"""What objectives may carry: extra tensors, row groups, state, a frozen model, terms that layers add to the loss.

The four objectives of `small_objectives.py`, each with equal gradients for any number of microbatches, with the same
bits after it was stopped or killed, and with the same weights on one process and on two.
"""

import inspect
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import small_objectives
import tiny_run
import torch
from torch import Tensor

from distributed import RankError, run_distributed, start_distributed
from modelwright.core.config import ConfigError, Stopped
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, FeedForward
from modelwright.model.head_selection import AuxiliaryLoss
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import Technique, Update

pytestmark = pytest.mark.slow

NAMES = ("Ppo", "Dpo", "Distillation", "Replay")
NONE: dict[str, Any] = {}
NUM_STEPS = 5
"""Two rollouts of two steps, and the first step of a third one."""
EVERY_STEP = {"checkpoint_every_steps": 1, "eval_every_steps": 0, "keep_best": False}


def other_model(seed: int, dtype: torch.dtype) -> Decoder:
    """A model of the same shape with other weights."""
    model = Decoder(tiny_run.SHAPE)
    model.init_weights(seed)
    return model.to(dtype)


def make(name: str, world: World, dtype: torch.dtype) -> Objective:
    """The objective; a frozen model is divided over the ranks where there are several."""
    kind = getattr(small_objectives, name)
    if name in ("Dpo", "Distillation"):
        return kind(FrozenModel(other_model(5, dtype), world, sharded=world.size > 1))
    return kind()


def train(
    world: World,
    name: str,
    folder: Path,
    *,
    changes: Any = NONE,
    parallel: Any = NONE,
    stop: int = 0,
    fp64: bool = True,
) -> dict[str, Tensor]:
    """Train `NUM_STEPS`; the final weights by name, the gradients of each update under `step/position`, and the
    objective's metrics under `name, step`."""
    torch.set_num_threads(1)
    dtype = torch.float64 if fp64 else torch.float32
    model, objective, found = tiny_run.tiny_model(dtype), make(name, world, dtype), {}

    def keep(update: Update) -> None:
        found.update({f"{update.step}/{i}": gradient.clone() for i, gradient in enumerate(update.tensors)})
        for metric in objective.metric_names:
            found[f"{metric}, {update.step}"] = torch.tensor(update.metrics[metric], dtype=torch.float64)

    techniques = [
        tiny_run.always(Technique(name="keep", on_gradients=keep, needs=frozenset())),
        *tiny_run.watching(stop=tiny_run.StopAfter(stop)),
    ]
    tiny_run.run(
        folder,
        tiny_run.settings(**{"num_steps": NUM_STEPS, **EVERY_STEP, **changes}),
        model=model,
        objective=objective,
        world=world,
        techniques=techniques,
        parallel=ParallelConfig(**parallel),
        heldout=[],
    )
    return found | {key: weight.clone() for key, weight in model.state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_they_are_small(name: str) -> None:
    assert len(inspect.getsource(getattr(small_objectives, name)).splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_microbatches_gives_the_same_gradients(name: str, tmp_path: Path) -> None:
    short = {"num_steps": 4, "checkpoint_every_steps": 0}
    whole = train(single(), name, tmp_path / "whole", changes=short)
    assert any(bool(value.any()) for key, value in whole.items() if key.startswith("3/"))
    balanced = {"gradient_accumulation_steps": 2, "load_balance": {"tokens": True}}
    for number, changes in enumerate([{"gradient_accumulation_steps": n} for n in (3, 4)] + [balanced]):
        assert_close(whole, train(single(), name, tmp_path / str(number), changes=short | changes))


@pytest.mark.parametrize("name", ["Ppo", "Dpo"])
def test_a_selection_keeps_groups_whole(name: str, tmp_path: Path) -> None:
    selection = {"signal": "loss", "keep_fraction": 0.5, "probe_tokens": 8}
    changes = {
        "gradient_accumulation_steps": 2,
        "batch_selection": selection,
        "precision": {"policy": "fp32"},
    }
    seen = []
    objective = make(name, single(), torch.float32)
    weights_of = objective.weights

    def weights(batch: TokenBatch) -> Any:
        seen.append(batch)
        return weights_of(batch)

    objective.weights = weights
    tiny_run.run(tmp_path, tiny_run.settings(num_steps=3, **EVERY_STEP, **changes), objective=objective, heldout=[])
    assert [batch.num_groups for batch in seen] == [2] * 3
    if name == "Dpo":
        pairs = [tiny_run.Rows().batch(step).input_ids_BT.view(4, 2, -1) for step in range(3)]
        for batch, given in zip(seen, pairs, strict=True):
            for pair in batch.input_ids_BT.view(2, 2, -1):
                assert any(torch.equal(pair, one) for one in given)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = train(single(), name, tmp_path / "whole", fp64=False)
    with pytest.raises(Stopped):
        train(single(), name, tmp_path / "cut", fp64=False, stop=3)  # between the two steps of a rollout
    resumed = train(single(), name, tmp_path / "cut", fp64=False)
    assert "2/0" not in resumed
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())


def die_amid_a_rollout(world: World, folder: Path) -> None:
    """Die by SIGKILL in the third rollout, which begins at step 4."""
    num_calls = 0

    def count(num_finished: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2 * (tiny_run.LENGTH - small_objectives.PROMPT_LEN) + 10:
            os.kill(os.getpid(), signal.SIGKILL)

    objective = small_objectives.Ppo(on_generated=count)
    tiny_run.run(
        folder, tiny_run.settings(num_steps=NUM_STEPS, **EVERY_STEP), objective=objective, world=world, heldout=[]
    )


def test_a_run_that_is_killed_amid_a_rollout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    (ended,) = start_distributed(die_amid_a_rollout, 1, tmp_path / "cut").wait()
    assert ended.code == -signal.SIGKILL
    resumed = train(single(), "Ppo", tmp_path / "cut", fp64=False)
    assert {key.split("/")[0] for key in resumed if "/" in key} <= {"3", "4", "5"}
    whole = train(single(), "Ppo", tmp_path / "whole", fp64=False)
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())


def on_two_ranks(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    """All objectives in one world: as copies, and as a pipeline beside a frozen model that is divided."""
    found = {name: train(world, name, folder / name) for name in NAMES}
    for name in ("Ppo", "Replay"):  # a checkpoint of one process, between the two steps of a rollout
        found[f"{name} resumed"] = train(world, name, folder / "cut" / name)
    staged = {"parallel": {"pipeline": 2}, "changes": {"gradient_accumulation_steps": 2}}
    found["Distillation pipeline"] = train(world, "Distillation", folder / "staged", **staged)
    found["Dpo pipeline"] = train(world, "Dpo", folder / "staged-dpo", **staged)
    return found


@pytest.mark.slow
def test_two_data_ranks_give_the_weights_of_one(tmp_path: Path) -> None:
    for name in ("Ppo", "Replay"):
        with pytest.raises(Stopped):
            train(single(), name, tmp_path / "cut" / name, stop=3)
    first, second = run_distributed(on_two_ranks, 2, tmp_path)
    for name in NAMES:
        alone = train(single(), name, tmp_path / "alone" / name)
        weights = {key: value for key, value in alone.items() if "/" not in key}
        for ended in (first, second):
            for case, found in ended.items():
                if case.split()[0] == name:
                    assert_close(weights, {key: value for key, value in found.items() if "/" not in key})


def refuse_divided_rollouts(world: World, folder: Path) -> list[str]:
    """The refusals of rollouts on models that are divided, with and without the objective's own `needs`."""
    layouts: tuple[dict[str, Any], ...] = ({"zero_stage": 1}, {"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2})
    refusals = []
    for number, parallel in enumerate(layouts):
        with pytest.raises(ConfigError) as refused:
            train(world, "Ppo", folder / str(number), parallel=parallel)
        refusals.append(str(refused.value))
    needs = small_objectives.Ppo.needs
    small_objectives.Ppo.needs = frozenset()
    try:
        for number, parallel in enumerate(layouts):
            with pytest.raises(ConfigError) as refused:
                train(world, "Ppo", folder / f"undeclared-{number}", parallel=parallel)
            refusals.append(str(refused.value))
    finally:
        small_objectives.Ppo.needs = needs
    return refusals


def test_rollouts_on_a_divided_model_are_refused_by_name(tmp_path: Path) -> None:
    declared = r"Ppo: needs a whole model on every rank, which parallel\."
    generated = "parallel: generation needs a whole model on every rank"
    for refusals in run_distributed(refuse_divided_rollouts, 2, tmp_path):
        assert all(re.match(declared, text) for text in refusals[:4])
        assert [text.startswith(generated) for text in refusals[4:]] == [True] * 4


def test_a_preference_needs_whole_rows(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ConfigError: Dpo: needs whole rows on every rank, which parallel.context"):
        run_distributed(refuse_context, 2, tmp_path)


def refuse_context(world: World, folder: Path) -> None:
    train(world, "Dpo", folder, parallel={"context": 2})


def test_a_batch_is_cut_between_groups() -> None:
    rows = tiny_run.Rows().batch(0)
    extras = {"rewards_B": torch.arange(8.0), "advantages_BT": torch.arange(8.0 * 32).view(8, 32)}
    batch = TokenBatch(**{**vars(rows), "extras": extras, "group_size": 2})
    assert [part.num_rows for part in batch.split(3)] == [4, 2, 2]
    taken = batch.take(torch.tensor([3, 1]))
    assert taken.extras["rewards_B"].tolist() == [6, 7, 2, 3]
    padded = batch.padded(6)
    assert padded.num_rows == 12
    assert (padded.labels_BT[8:] == IGNORED).all()
    assert not padded.extras["advantages_BT"][8:].any()
    places = torch.tensor([0, 1, 30, 31])
    cut = batch.take_tokens(places)
    assert torch.equal(cut.extras["advantages_BT"], extras["advantages_BT"][:, places])
    assert torch.equal(cut.extras["rewards_B"], extras["rewards_B"])
    with pytest.raises(ValueError, match="3 groups of rows cannot be divided into 4"):
        batch.take(torch.arange(3)).split(4)
    for wrong, text in (({"group_size": 3}, "8 rows"), ({"extras": {"rewards": torch.ones(8)}}, "rewards_B")):
        with pytest.raises(ValueError, match=text):
            TokenBatch(**{**vars(rows), **wrong})
    with pytest.raises(ValueError, match="shape"):
        TokenBatch(**{**vars(rows), "extras": {"x_BT": torch.ones(8, 31)}})


@pytest.mark.parametrize("sharded", [False, True])
def test_a_frozen_model_gives_what_the_model_gives(sharded: bool) -> None:
    model, batch = other_model(5, torch.float64), tiny_run.Rows().batch(3)
    frozen = FrozenModel(model, single(), sharded=sharded)
    hidden_BTD = frozen.hidden(batch, num_parts=3)
    logits_BTV = model.logits(hidden_BTD)
    expected = logits_BTV.log_softmax(-1).gather(2, batch.labels_BT.clamp(min=0)[..., None])[..., 0]
    found = frozen.log_probs(batch, num_parts=2, chunk_tokens=50)
    torch.testing.assert_close(found, expected * (batch.labels_BT != IGNORED))
    torch.testing.assert_close(frozen.logits(batch), logits_BTV)
    assert not any(parameter.requires_grad for parameter in frozen.executor.model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


class Penalized(FeedForward):
    """A layer whose outputs should be small: the mean of their squares over tokens, times `weight`."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD = super().forward(x_BTD)
        return self.penalty(out_BTD, out_BTD.square().sum())

    @staticmethod
    def put_into(block: Any, weight: float) -> None:
        block.ffn.__class__ = Penalized
        block.ffn.penalty = AuxiliaryLoss("penalty", weight)


class Plain(FeedForward):
    """The same layer without the penalty's gradient; keeps what it would be computed from."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD = super().forward(x_BTD)
        self.sums.append(out_BTD.square().sum())
        return out_BTD

    @staticmethod
    def put_into(block: Any) -> None:
        block.ffn.__class__ = Plain
        block.ffn.sums = []


class WithPenalty(tiny_run.Float64Objective):
    """The naive twin: the penalty as one more term of the objective."""

    def weights(self, batch):
        return {**super().weights(batch), "penalty": (batch.segments_BT >= 0).sum()}

    def losses(self, output, batch, model):
        sums = torch.stack([block.ffn.sums.pop() for block in model.blocks.values()])
        return Terms({**super().losses(output, batch, model).losses, "penalty": 0.3 * sums.sum()})


def penalize(world: World, folder: Path, *, changes: Any = NONE, parallel: Any = NONE, naive: bool = False) -> Any:
    """Train with a penalty on each feed-forward part, by the layers themselves or by the objective."""
    torch.set_num_threads(1)
    model = tiny_run.tiny_model(torch.float64)
    for block in model.blocks.values():
        Plain.put_into(block) if naive else Penalized.put_into(block, 0.3)
    objective = (WithPenalty if naive else tiny_run.Float64Objective)(tiny_run.Rows())
    config = tiny_run.settings(**{"num_steps": 4, **EVERY_STEP, **changes})
    tiny_run.run(
        folder, config, model=model, objective=objective, world=world, parallel=ParallelConfig(**parallel), heldout=[]
    )
    return {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 4}, {"activation_checkpointing": {"mode": "full", "layers_per_segment": 2}}],
)
def test_a_layers_own_loss_is_a_term_of_the_objective(changes: dict[str, Any], tmp_path: Path) -> None:
    naive = penalize(single(), tmp_path / "naive", naive=True)
    assert_close(naive, penalize(single(), tmp_path / "layers", changes=changes))
    plain = tiny_run.tiny_model(torch.float64)
    assert (tmp_path / "layers" / "metrics.jsonl").read_text().count('"auxiliary_loss/penalty"') == 4
    assert any(not torch.equal(w, plain.state_dict()[k]) for k, w in naive.items())


def penalize_on_two_ranks(world: World, folder: Path) -> list[Any]:
    return [
        penalize(world, folder / "copies"),
        penalize(world, folder / "context", parallel={"context": 2}),
        penalize(world, folder / "zero", parallel={"zero_stage": 3}),
        penalize(world, folder / "stages", parallel={"pipeline": 2}, changes={"gradient_accumulation_steps": 2}),
    ]


def test_a_layers_own_loss_is_the_same_in_any_layout(tmp_path: Path) -> None:
    naive = penalize(single(), tmp_path / "naive", naive=True)
    for ended in run_distributed(penalize_on_two_ranks, 2, tmp_path):
        for found in ended:
            assert_close(naive, found)
