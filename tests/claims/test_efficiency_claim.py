"""The whole stack against a plain loop: that the plain loop trains the same model, the arms, the verdict."""

import time
from dataclasses import replace

import pytest
import torch

from modelwright.core.errors import ArtifactError
from modelwright.core.progress import SilentProgress
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.parallel.mesh import single
from modelwright.train.config import TrainConfig
from modelwright.train.technique import StepInfo
from modelwright_claims import efficiency_20x
from modelwright_claims.claim import Setting
from modelwright_claims.efficiency_20x import (
    FULL,
    PLAIN,
    SEEDS,
    TUNING_SEEDS,
    Scene,
    Tuned,
    Tuning,
    arms_of,
    judge,
    run_all,
    scenes,
    stacks,
)
from modelwright_claims.efficiency_probe import Arm, Stopwatch
from modelwright_claims.plain_training import PlainDecoder, train_plainly
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


def test_the_stopwatch_counts_what_lies_between_steps_and_all_of_the_first():
    watch = Stopwatch()
    watch.observe(step_of(0.5))
    time.sleep(0.1)
    watch.observe(step_of(0.01))
    assert 0.6 <= watch.seconds < 0.6 + 5


def step_of(seconds: float) -> StepInfo:
    values = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "data_wait_s"), 0.0)
    return StepInfo(step=1, losses={}, num_tokens=1, exchange_s=0.0, step_time_s=seconds, bytes_sent=0, **values)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_ingredients_are_added_one_at_a_time_and_left_out_one_at_a_time(monkeypatch, has_bf16):
    """BF16 is one of them where there are instructions for it."""
    monkeypatch.setattr(efficiency_20x, "is_widened", lambda dtype, device: not has_bf16)
    stack = stacks()["two hosts"]
    arms = arms_of(stack)
    assert arms[PLAIN] == stack.plain
    assert arms["+ packing"] == Arm(mode="best_fit", hosts=2)
    assert arms[FULL].settings["optimizer"] == "muon"
    assert arms[FULL].settings["transport"]["kind"] == "int8"
    assert arms["without packing"] == replace(arms[FULL], mode="pad")
    assert ("without BF16" in arms) == ("+ BF16" in arms) == has_bf16
    assert ("precision" in arms[FULL].settings) == has_bf16
    assert not any(arm.plain for name, arm in arms.items() if name != PLAIN)
    assert len({str(arm) for arm in arms.values()}) == len(arms)
    alone = arms_of(stacks()["one host"])
    assert alone["everything + sparse rows"].settings["sparse"]["batch"]["signal"] == "loss"
    assert alone["everything + adaptive precision"].settings["optimizer"] == "muon"


def test_each_stack_is_also_compared_on_a_wider_model():
    found = scenes(quick=False)
    assert list(found) == ["one host", "two hosts", "one host, wide", "two hosts, wide"]
    for name in ("one host", "two hosts"):
        whole, wide = found[name], found[f"{name}, wide"]
        assert wide.size == replace(whole.size, model_dim=2 * whole.size.model_dim)
        assert wide.arms == {end: whole.arms[end] for end in (PLAIN, FULL)}
        assert wide.goal == whole.goal
    assert {name: list(scene.arms) for name, scene in scenes(quick=True).items()} == {
        name: [PLAIN, FULL] for name in ("one host", "two hosts")
    }


def test_tuning_takes_the_fewest_steps_that_reach_the_plain_loss_and_makes_no_run_twice(monkeypatch, tmp_path):
    """A loss that falls with the steps; Muon needs half of them, local steps lose a little. On one seed the plain loop
    is lucky."""
    runs = []

    def loss_of(setting, arm, size, *, seed, mbit, threads):
        runs.append((str(arm), size.num_steps, size.learning_rate, seed))
        assert (mbit, threads) == (0, 1)
        assert arm.hosts == 1 or "transport" in arm.settings
        pace = (2.0 if arm.settings.get("optimizer") == "muon" else 1.0) * (0.7 if "transport" in arm.settings else 1.0)
        best = 1e-3 if arm.mode == "pad" and not arm.plain else 4e-3
        luck = (TUNING_SEEDS.index(seed) - 0.5) if arm.plain else 0
        return {"heldout_loss": 5 - pace * size.num_steps / 100 + abs(size.learning_rate - best) + luck}

    monkeypatch.setattr(efficiency_20x, "train_arm", loss_of)
    monkeypatch.setattr(efficiency_20x, "make_rows", lambda setting, size: None)
    monkeypatch.setattr(efficiency_20x, "is_widened", lambda dtype, device: True)
    setting = Setting(folder=tmp_path, quick=False, progress=SilentProgress(), kept=tmp_path / "kept")
    tuning = Tuning(setting, quick=False)
    one, two = (tuning.tune(arms_of(stacks()[name]), SIZE) for name in ("one host", "two hosts"))
    assert len(set(runs)) == len(runs)
    assert (one[PLAIN].size.num_steps, one[PLAIN].size.learning_rate) == (100, 4e-3)
    assert one["+ packing"].size.num_steps == 100
    assert one["+ own loop and operators"].size.learning_rate == 1e-3
    assert one["without packing"].size.learning_rate == 1e-3
    assert one[FULL].size.num_steps == two["+ Muon"].size.num_steps == 55  # half of them would only just do
    assert two[FULL].size.num_steps == 80  # of the 85 that would do, in whole periods of 20

    num_runs = len(runs)
    assert Tuning(setting, quick=False).tune(arms_of(stacks()["one host"]), SIZE) == one
    assert len(runs) == num_runs
    monkeypatch.setattr(efficiency_20x, "file_digest", lambda module: "the plain loop has changed")
    assert Tuning(setting, quick=False).tune(arms_of(stacks()["one host"]), SIZE) == one
    again = {(seed, run) for run, *_, seed in runs[num_runs:]}
    assert again == {(seed, str(arms_of(stacks()["one host"])[PLAIN])) for seed in TUNING_SEEDS}
    (tmp_path / "kept" / "efficiency_20x.json").write_text("[1, 2]")
    with pytest.raises(ArtifactError, match="is no record of a measurement"):
        Tuning(setting, quick=False)


def test_a_call_that_was_interrupted_goes_on_with_the_seed_that_was_not_finished(monkeypatch, tmp_path):
    runs = []

    def seconds_of(setting, arm, size, *, seed):
        if len(runs) == 7 and seed == SEEDS[1]:
            runs.append(None)
            raise KeyboardInterrupt
        runs.append((str(arm), seed))
        return {"seconds": float(len(runs)), "heldout_loss": 3.0}

    monkeypatch.setattr(efficiency_20x, "train_arm", seconds_of)
    setting = Setting(folder=tmp_path, quick=False, progress=SilentProgress(), kept=tmp_path / "kept")
    arms = {name: arms_of(stacks()["one host"])[name] for name in (PLAIN, FULL, "+ packing", "without packing")}
    tuned = {name: Tuned(size=SIZE, loss=3.0) for name in arms}
    with pytest.raises(KeyboardInterrupt):
        run_all(setting, "one host", arms, tuned)
    found = run_all(setting, "one host", arms, tuned)
    assert {name: len(of_arm) for name, of_arm in found.items()} == dict.fromkeys(arms, 3)
    assert len(runs) == 4 + 4 + 4 + 4  # of the second seed three, the interruption, and all of it again
    assert found[PLAIN][0]["seconds"] == 1.0
    other = {name: replace(one, size=replace(SIZE, num_steps=50)) for name, one in tuned.items()}
    run_all(setting, "one host", arms, other)
    assert len(runs) == 16 + 12


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
        "one host": Scene(arms={PLAIN: Arm(plain=True)}, size=SIZE, goal=5.0),
        "two hosts": Scene(arms={PLAIN: Arm(plain=True, hosts=2)}, size=replace(SIZE, model_dim=128), goal=20.0),
    }
    found = judge({"one host": arms(one), "two hosts": arms(two)}, dict.fromkeys(compared, tuned), compared)
    assert found.conditions["parameters, two hosts"] != found.conditions["parameters"]
    assert found.kind == kind
    assert found.figures["one host: faster, everything"].value == pytest.approx(100 / one)
    assert found.figures["two hosts: steps, everything"].value == 50


def test_one_setting_alone_does_not_meet_the_claim():
    runs = {name: [{"seconds": value, "heldout_loss": 3.0}] for name, value in ((PLAIN, 100.0), (FULL, 1.0))}
    tuned = {name: Tuned(size=SIZE, loss=3.0) for name in runs}
    alone = Scene(arms={PLAIN: Arm(plain=True)}, size=SIZE, goal=5.0)
    assert judge({"one host": runs}, {"one host": tuned}, {"one host": alone}).kind == "short"
