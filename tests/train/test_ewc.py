"""EWC against its formula: the pull by autograd, the Fisher information by naive twins, ranks, and a stop."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed import run_distributed
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import Stopped
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.objective import forward
from modelwright.train.technique import Runtime, Technique, Update
from modelwright.train.techniques import ewc
from modelwright.train.techniques.ewc import fisher_diagonal, sampled_labels
from refusals import config_error

pytestmark = pytest.mark.slow

STRENGTH = 50.0
SHORT = {
    "num_steps": 4, "checkpoint_every_steps": 2, "eval_every_steps": 0, "keep_best": False, "max_grad_norm": 0.0,
    "ewc": {"strength": STRENGTH},
}  # fmt: skip
SMALLEST = ModelConfig(
    vocab_size=16, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16, head_dim=8, max_seq_len=8
)
OFF = {**SHORT, "ewc": {"strength": 0.0}}


def old_rows(count: int = 3) -> list[TokenBatch]:
    return [tiny_run.Rows(num_rows=1).batch(700 + number) for number in range(count)]


def short_row() -> TokenBatch:
    """Seven tokens of one document, of which five are followed by a label."""
    tokens_BT = torch.tensor([[5, 9, 2, 14, 9, 1, 5]])
    labels_BT = tokens_BT.roll(-1)
    labels_BT[0, 3] = labels_BT[0, 6] = IGNORED
    return TokenBatch(
        input_ids_BT=tokens_BT,
        labels_BT=labels_BT,
        positions_BT=torch.arange(7)[None],
        segments_BT=torch.zeros_like(tokens_BT).int(),
    )


def peaked_model(shape: ModelConfig) -> Decoder:
    """With weights that are large enough for its distributions to be far from uniform."""
    model = Decoder(shape)
    model.init_weights(0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 4.0
    return model


def squares(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.square() for name, one in model.named_parameters() if one.grad is not None}


def test_the_information_is_that_of_one_backward_pass_per_row() -> None:
    model, rows = peaked_model(tiny_run.SHAPE), old_rows()
    found = fisher_diagonal(model, rows, seed=3, world=single())
    expected = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for number, row in enumerate(rows):
        draw = torch.Generator().manual_seed(ewc.derive_seed(3, number))
        with torch.no_grad():
            labels_BT = sampled_labels(model, forward(model, row), row.labels_BT, draw)
        assert torch.equal(labels_BT == IGNORED, row.labels_BT == IGNORED)
        logits_BTV = model.logits(forward(model, row))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
        for name, square in squares(model, loss).items():
            expected[name] += square / sum(row.num_targets for row in rows)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-15)


def test_its_mean_is_the_exact_information_of_single_tokens() -> None:
    """Over all tokens of the vocabulary at each place, weighted by their probabilities; 400 samples come near."""
    model, row = peaked_model(SMALLEST), short_row()
    exact = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    places = (row.labels_BT[0] != IGNORED).nonzero().flatten().tolist()
    for place in places:
        for token in range(SMALLEST.vocab_size):
            log_probs_V = model.logits(forward(model, row))[0, place].log_softmax(-1)
            for name, square in squares(model, log_probs_V[token]).items():
                exact[name] += square * log_probs_V[token].exp().detach() / len(places)
    found = fisher_diagonal(model, [row] * 400, seed=1, world=single())
    flat, flat_exact = (torch.cat([one.flatten() for one in each.values()]) for each in (found, exact))
    assert float(flat.sum() / flat_exact.sum()) == pytest.approx(1.0, abs=0.1)
    assert float(torch.corrcoef(torch.stack([flat, flat_exact]))[0, 1]) > 0.97


def gradients_of(folder: Path, settings: dict, step: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """What the optimizer gets in a step, the weights before it, and the penalty in the record."""
    gradients, weights, penalty = {}, {}, []

    def watch(run: Runtime) -> Technique:
        def on_gradients(update: Update) -> None:
            if update.step == step:
                gradients.update({view.name: view.tensor.clone() for view in update.gradients})
                weights.update({view.name: view.tensor.clone() for view in run.parameters()})
                penalty.append(update.metrics.get("ewc_penalty", 0.0))

        return Technique(name="watch", on_gradients=on_gradients, needs=frozenset())

    config = tiny_run.settings(**settings)
    tiny_run.run_in_float64(folder, config, heldout=[], techniques=[watch], old_rows=old_rows())
    return gradients, weights, penalty[0]


def test_the_gradient_is_that_of_the_loss_with_the_penalty(tmp_path: Path) -> None:
    """In the second step, before which the penalty changes nothing: weights are where they began."""
    plain, weights, _ = gradients_of(tmp_path / "plain", OFF)
    pulled, same_weights, penalty = gradients_of(tmp_path / "pulled", SHORT)
    start = tiny_run.tiny_model(torch.float64)
    with mock.patch.object(ewc, "fisher_diagonal", side_effect=fisher_diagonal) as spy:
        gradients_of(tmp_path / "again", SHORT)
    fisher = fisher_diagonal(start, old_rows(), seed=spy.call_args.kwargs["seed"], world=single())
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    total = sum(
        STRENGTH / 2 * (fisher[name] * (leaf - start.state_dict()[name]) ** 2).sum() for name, leaf in leaves.items()
    )
    assert isinstance(total, Tensor)
    total.backward()
    assert penalty == pytest.approx(float(total.detach()), rel=1e-9)
    assert penalty > 0
    for name, leaf in leaves.items():
        assert torch.equal(weights[name], same_weights[name])
        assert leaf.grad is not None
        torch.testing.assert_close(pulled[name], plain[name] + leaf.grad, rtol=1e-9, atol=1e-14)


def trained(folder: Path, **more) -> dict[str, Tensor]:
    config = tiny_run.settings(**SHORT)
    return tiny_run.run_in_float64(folder, config, heldout=[], old_rows=old_rows(), **more).state_dict()


def on_two_ranks(world: World, folder: Path) -> dict[str, Tensor]:
    return trained(folder, world=world)


def test_ranks_share_the_rows_and_have_the_same_information(tmp_path: Path) -> None:
    """Three rows on two ranks: normalized by the tokens of all."""
    alone = trained(tmp_path / "alone")
    for found in run_distributed(on_two_ranks, 2, tmp_path / "two"):
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)


def test_a_stopped_run_goes_on_with_the_same_bits_without_another_estimate(tmp_path: Path) -> None:
    config = tiny_run.settings(**SHORT)

    def run(folder: Path, *, seed: int = 0, stop: int = 0) -> dict[str, Tensor]:
        model = tiny_run.tiny_model()
        if seed:
            model.init_weights(seed)
        techniques = tiny_run.watching(stop=tiny_run.StopAfter(stop))
        tiny_run.run(folder, config, model=model, heldout=[], techniques=techniques, old_rows=old_rows())
        return model.state_dict()

    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "cut", stop=2)
    with pytest.raises(ArtifactError, match="ewc"):
        run(tmp_path / "cut", seed=99)
    with mock.patch.object(ewc, "fisher_diagonal", side_effect=AssertionError):
        resumed = run(tmp_path / "cut")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@dataclass(frozen=True)
class Half(tiny_run.Rows):
    """A task in one half of the vocabulary: which token follows which depends on the factor."""

    first: int = 0
    factor: int = 1

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        batch = super().batch(index, rank=rank, world_size=world_size)
        half = tiny_run.VOCABULARY // 2
        tokens_BT, labels_BT = (self.first + self.factor * one % half for one in (batch.input_ids_BT, batch.labels_BT))
        return replace(
            batch, input_ids_BT=tokens_BT, labels_BT=torch.where(batch.labels_BT == IGNORED, IGNORED, labels_BT)
        )


def test_a_model_forgets_less_with_it(tmp_path: Path) -> None:
    """A model that has learned one half of the vocabulary learns the other one."""
    old, new = Half(), Half(first=32, factor=3)
    first = tiny_run.tiny_model()
    brief = {**OFF, "checkpoint_every_steps": 0}
    tiny_run.run(
        tmp_path / "first",
        tiny_run.settings(**{**brief, "num_steps": 60}),
        model=first,
        heldout=[],
        objective=NextToken(old),
    )
    before = loss_of(first, old.batch(901))
    forgotten, learned = {}, {}
    for strength in (0.0, 100.0):
        model = Decoder(tiny_run.SHAPE)
        model.load_state_dict(first.state_dict())
        settings = {**brief, "num_steps": 25, "learning_rate": 3e-3, "ewc": {"strength": strength}}
        rows = [replace(old, num_rows=1).batch(number) for number in range(24)]
        tiny_run.run(
            tmp_path / str(strength),
            tiny_run.settings(**settings),
            model=model,
            heldout=[],
            old_rows=rows,
            objective=NextToken(new),
        )
        forgotten[strength] = loss_of(model, old.batch(901)) - before
        learned[strength] = loss_of(model, new.batch(901))
    assert forgotten[100.0] < 0.3 * forgotten[0.0]
    assert learned[100.0] < learned[0.0] + 0.1


@torch.no_grad()
def loss_of(model: Decoder, batch: TokenBatch) -> float:
    return float(model.cross_entropy(forward(model, batch), batch.labels_BT, chunk_tokens=512)) / batch.num_targets


@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_layouts_that_divide_the_model_are_refused(layout: dict, tmp_path: Path) -> None:
    from modelwright.train.config import check_layout

    with config_error("ewc.strength", match=r"ewc\.strength"):
        check_layout(tiny_run.settings(**SHORT), ParallelConfig(**layout), num_processes=2)


def test_what_it_cannot_do_without_is_refused(tmp_path: Path) -> None:
    for settings in ({"lora": {"r": 4}}, {"async_updates": {"mode": "hogwild"}}, {"optimizer_in_backward": True}):
        with config_error("ewc.strength", match=r"ewc\.strength"):
            tiny_run.settings(ewc={"strength": 1.0}, **settings)
    with config_error("ewc.strength", match=r"ewc\.strength: needs rows"):
        tiny_run.run(tmp_path, tiny_run.settings(**SHORT), heldout=[])
