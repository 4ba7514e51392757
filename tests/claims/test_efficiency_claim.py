"""The whole stack against a plain loop: that the plain loop trains the same model, the arms, the verdict."""

from dataclasses import replace

import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.parallel.mesh import single
from modelwright.train.config import TrainConfig
from modelwright_claims import efficiency_20x
from modelwright_claims.claim import Setting
from modelwright_claims.efficiency_20x import (
    FULL,
    PLAIN,
    SEEDS,
    TUNING_SEEDS,
    Scene,
    Tuned,
    arms_of,
    judge,
    scenes,
    time_arms,
    tune_arms,
)
from modelwright_claims.experiment import Runner
from modelwright_claims.plain_training import PlainDecoder, train_plainly
from modelwright_claims.training_run import Outcome, Processes, Run
from modelwright_claims.workbench import Size
from tiny_decoder import make_decoder
from tolerances import TOLERANCES

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=100)


def padded_batch() -> TokenBatch:
    """Rows of 12, 9 and 5 tokens; the rest is padding."""
    lengths = torch.tensor([12, 9, 5])[:, None]
    places = torch.arange(16).expand(3, 16)
    tokens = torch.randint(0, 96, (3, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, dims=1).masked_fill(places >= lengths - 1, IGNORED)
    segments = torch.where(places < lengths, 0, -1).int()
    return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=places.clone(), segments_BT=segments)


def test_the_plain_model_is_the_decoder():
    batch, model, twin = padded_batch(), make_decoder(), make_decoder()
    plain = PlainDecoder(model)(batch.input_ids_BT[:, :12], batch.labels_BT[:, :12])
    hidden = twin(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
    ours = twin.cross_entropy(hidden, batch.labels_BT, chunk_tokens=16) / batch.num_targets
    torch.testing.assert_close(plain, ours, **TOLERANCES["fp32_loss"])
    plain.backward()
    ours.backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **TOLERANCES["fp32_gradient"], msg=name)


def test_the_plain_loop_learns():
    model, batch = make_decoder(), padded_batch()
    config = TrainConfig(num_steps=20, learning_rate=1e-2)
    before = PlainDecoder(model)(batch.input_ids_BT, batch.labels_BT).item()
    seconds = train_plainly(model, iter([batch] * 20), config, num_steps=20, world=single())
    assert seconds > 0
    assert PlainDecoder(model)(batch.input_ids_BT, batch.labels_BT).item() < before - 1


@pytest.mark.parametrize("has_bf16", [True, False])
def test_ingredients_are_added_one_at_a_time_and_left_out_one_at_a_time(monkeypatch, has_bf16):
    """BF16 is one of them where there are instructions for it."""
    monkeypatch.setattr(efficiency_20x, "is_widened", lambda dtype, device: not has_bf16)
    arms = arms_of("two hosts", SIZE)
    assert arms[PLAIN] == Run(size=SIZE, loop="plain", mode="pad", processes=Processes(hosts=2))
    assert arms["+ packing"] == Run(size=SIZE, mode="best_fit", processes=Processes(hosts=2))
    assert arms[FULL].settings["optimizer"] == "muon"
    assert arms[FULL].settings["transport"]["kind"] == "int8"
    assert arms["without packing"] == replace(arms[FULL], mode="pad")
    assert ("without BF16" in arms) == ("+ BF16" in arms) == has_bf16
    assert ("precision" in arms[FULL].settings) == has_bf16
    assert not any(arm.loop == "plain" for name, arm in arms.items() if name != PLAIN)
    assert len({str(arm) for arm in arms.values()}) == len(arms)
    alone = arms_of("one host", SIZE)
    assert alone["everything + sparse rows"].settings["sparse"]["batch"]["signal"] == "loss"
    assert alone["everything + adaptive precision"].settings["optimizer"] == "muon"


def test_each_stack_is_also_compared_on_a_wider_model():
    found = scenes(quick=False)
    assert list(found) == ["one host", "two hosts", "one host, wide", "two hosts, wide"]
    for name in ("one host", "two hosts"):
        whole, wide = found[name], found[f"{name}, wide"]
        assert wide.size == replace(whole.size, model_dim=2 * whole.size.model_dim)
        assert wide.arms == {end: replace(whole.arms[end], size=wide.size) for end in (PLAIN, FULL)}
        assert wide.goal == whole.goal
    assert {name: list(scene.arms) for name, scene in scenes(quick=True).items()} == {
        name: [PLAIN, FULL] for name in ("one host", "two hosts")
    }


class Bench:
    """Pretends to make runs: the loss falls with the steps, Muon needs half of them, local steps lose a little.

    The best rate is 1e-3 where the product pads rows, 4e-3 everywhere else. On one seed the plain loop is lucky.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Run] = []
        monkeypatch.setattr(efficiency_20x, "is_widened", lambda dtype, device: True)
        monkeypatch.setattr(
            efficiency_20x, "real_token_share", lambda setting, size, *, mode: 1.0 - 0.5 * (mode == "pad")
        )
        monkeypatch.setattr(Runner, "all", lambda self, runs, *, at_once=1: [bench.outcome(run) for run in runs])
        monkeypatch.setattr(Runner, "timed", lambda self, runs: [bench.outcome(run) for run in runs])
        bench = self

    def outcome(self, run: Run) -> Outcome:
        self.made.append(run)
        plain = run.loop == "plain"
        pace = 2.0 if run.settings.get("optimizer") == "muon" else 1.0
        pace *= 0.7 if "transport" in run.settings else 1.0
        best = 1e-3 if run.mode == "pad" and not plain else 4e-3
        luck = TUNING_SEEDS.index(run.seed) - 0.5 if plain and run.seed in TUNING_SEEDS else 0.0
        loss = 5 - pace * run.size.num_steps / 100 + abs(run.size.learning_rate - best) + luck
        return Outcome(heldout_loss=loss, seconds=float(run.size.num_steps))


def test_tuning_takes_the_fewest_steps_that_reach_the_plain_loss(monkeypatch, tmp_path):
    bench = Bench(monkeypatch)
    setting = Setting(folder=tmp_path, quick=False, progress=SilentProgress())
    one, two = (tune_arms(setting, arms_of(name, SIZE)) for name in ("one host", "two hosts"))
    assert (one[PLAIN].size.num_steps, one[PLAIN].size.learning_rate) == (100, 4e-3)
    assert one[PLAIN].loss == pytest.approx(4.0)
    assert one["+ packing"].size.num_steps == 100
    assert one["+ own loop and operators"].size.learning_rate == 1e-3
    assert one["without packing"].size.learning_rate == 1e-3
    assert one[FULL].size.num_steps == two["+ Muon"].size.num_steps == 55  # half of them would only just do
    assert two[FULL].size.num_steps == 80  # of the 85 that would do, in whole periods of 20
    assert (one[PLAIN].size.batch_rows, one[FULL].size.batch_rows) == (2 * SIZE.batch_rows, SIZE.batch_rows)
    assert {run.heldout for run in bench.made} == {"validation"}
    assert {run.seed for run in bench.made} == set(TUNING_SEEDS)
    assert all(run.processes.threads == 1 and run.processes.mbit is None for run in bench.made)
    assert {run.processes.hosts for run in bench.made if "transport" not in run.settings} == {1}


def test_arms_are_timed_on_other_seeds_with_all_cores_or_on_linked_hosts(monkeypatch, tmp_path):
    bench = Bench(monkeypatch)
    setting = Setting(folder=tmp_path, quick=False, progress=SilentProgress())
    for name, expected in (
        ("one host", Processes(threads=efficiency_20x.num_usable_cores())),
        ("two hosts", Processes(hosts=2, threads=1, mbit=efficiency_20x.MBIT)),
    ):
        arms = {end: arms_of(name, SIZE)[end] for end in (PLAIN, FULL)}
        tuned = {PLAIN: Tuned(size=SIZE, loss=3.0), FULL: Tuned(size=replace(SIZE, num_steps=50), loss=3.0)}
        found = time_arms(setting, arms, tuned)
        assert {run.processes for run in bench.made} == {expected}
        assert [run.seed for run in bench.made] == [seed for seed in SEEDS for _ in arms]
        assert {run.heldout for run in bench.made} == {"test"}
        assert [run["seconds"] for run in found[FULL]] == [50.0] * len(SEEDS)
        bench.made.clear()


@pytest.mark.parametrize(
    ("one", "two", "loss", "kind"),
    [(20.0, 5.0, 3.0, "met"), (21.0, 5.0, 3.0, "short"), (20.0, 5.1, 3.0, "short"), (20.0, 5.0, 3.01, "short")],
)
def test_both_settings_have_to_reach_their_goal_at_no_higher_loss(one, two, loss, kind):
    def arms(seconds: float) -> dict:
        return {
            PLAIN: [{"seconds": 100.0, "heldout_loss": 3.0}],
            FULL: [{"seconds": seconds, "heldout_loss": loss}],
        }

    tuned = {PLAIN: Tuned(size=SIZE, loss=3.0), FULL: Tuned(size=replace(SIZE, num_steps=50), loss=3.0)}
    compared = {
        "one host": Scene(arms={PLAIN: Run(size=SIZE)}, goal=5.0),
        "two hosts": Scene(
            arms={PLAIN: Run(size=replace(SIZE, model_dim=128), processes=Processes(hosts=2))}, goal=20.0
        ),
    }
    found = judge({"one host": arms(one), "two hosts": arms(two)}, dict.fromkeys(compared, tuned), compared)
    assert found.conditions["parameters, two hosts"] != found.conditions["parameters"]
    assert found.kind == kind
    assert found.figures["one host: faster, everything"].value == pytest.approx(100 / one)
    assert found.figures["two hosts: steps, everything"].value == 50


def test_one_setting_alone_does_not_meet_the_claim():
    runs = {name: [{"seconds": value, "heldout_loss": 3.0}] for name, value in ((PLAIN, 100.0), (FULL, 1.0))}
    tuned = {name: Tuned(size=SIZE, loss=3.0) for name in runs}
    alone = Scene(arms={PLAIN: Run(size=SIZE)}, goal=5.0)
    assert judge({"one host": runs}, {"one host": tuned}, {"one host": alone}).kind == "short"
