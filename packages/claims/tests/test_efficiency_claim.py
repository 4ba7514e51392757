"""The whole stack against a plain loop: that the plain loop trains the same model, the arms, the verdict."""

import contextlib
from dataclasses import replace

import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.parallel.mesh import single
from modelwright.train.config import TrainConfig
from modelwright_claims import efficiency_20x, plain_training
from modelwright_claims.claim import Setting, Verdict
from modelwright_claims.efficiency_20x import (
    CLAIM,
    FULL,
    NO_NETWORK,
    PLAIN,
    PLAIN_BY_ONEDNN,
    SEEDS,
    TUNING_SEEDS,
    Tuned,
    arms_of,
    measurement,
    scenes,
    time_arms,
    tune_arms,
)
from modelwright_claims.experiment import Runner
from modelwright_claims.judging import judge
from modelwright_claims.large_runs import NO_ONEDNN
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
    monkeypatch.setattr(efficiency_20x, "is_emulated", lambda dtype, device: not has_bf16)
    monkeypatch.setattr(efficiency_20x, "onednn_is_exact", lambda: False)
    arms = arms_of("two hosts", SIZE)
    assert arms[PLAIN] == Run(size=SIZE, loop="plain", mode="one_per_row", processes=Processes(hosts=2))
    assert arms["+ packing"] == Run(size=SIZE, mode="best_fit", processes=Processes(hosts=2))
    assert arms[FULL].settings["optimizer"] == "muon"
    assert arms[FULL].settings["gradient_sync"]["kind"] == "int8"
    assert arms["without packing"] == replace(arms[FULL], mode="one_per_row")
    assert ("without BF16" in arms) == ("+ BF16" in arms) == has_bf16
    assert ("precision" in arms[FULL].settings) == has_bf16
    assert not any(arm.loop == "plain" for name, arm in arms.items() if name != PLAIN)
    assert len({str(arm) for arm in arms.values()}) == len(arms)
    alone = arms_of("one host", SIZE)
    assert alone["everything + sparse rows"].settings["batch_selection"]["signal"] == "loss"
    assert alone["everything + adaptive precision"].settings["optimizer"] == "muon"


def test_two_hosts_are_compared_without_the_single_ingredients(monkeypatch):
    monkeypatch.setattr(efficiency_20x, "onednn_is_exact", lambda: False)
    found = scenes(quick=False)
    size = found["one host"][PLAIN].size
    assert found["one host"] == arms_of("one host", size)
    every = arms_of("two hosts", size)
    assert found["two hosts"] == {name: every[name] for name in (PLAIN, "+ Muon", FULL)}
    exact = {key: value for key, value in every[FULL].settings.items() if key != "gradient_sync"}
    assert every["+ Muon"] == replace(every[FULL], settings=exact)
    assert {name: list(arms) for name, arms in scenes(quick=True).items()} == {
        name: [PLAIN, FULL] for name in ("one host", "two hosts")
    }


class Bench:
    """Pretends to make runs: the loss falls with the steps, Muon needs half of them, local steps lose a little.

    The best rate is 1e-3 where the product pads rows, 4e-3 everywhere else. On one seed the plain loop is lucky.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Run] = []
        monkeypatch.setattr(efficiency_20x, "is_emulated", lambda dtype, device: True)
        monkeypatch.setattr(efficiency_20x, "onednn_is_exact", lambda: False)
        monkeypatch.setattr(
            efficiency_20x, "real_token_share", lambda setting, size, *, mode: 1.0 - 0.5 * (mode == "one_per_row")
        )
        monkeypatch.setattr(Runner, "all", lambda self, runs, *, at_once=1: [bench.outcome(run) for run in runs])
        monkeypatch.setattr(Runner, "timed", lambda self, runs: [bench.outcome(run) for run in runs])
        bench = self

    def outcome(self, run: Run) -> Outcome:
        self.made.append(run)
        plain = run.loop == "plain"
        pace = 2.0 if run.settings.get("optimizer") == "muon" else 1.0
        pace *= 0.7 if "gradient_sync" in run.settings else 1.0
        best = 1e-3 if run.mode == "one_per_row" and not plain else 4e-3
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
    for compresses, hosts in ((False, {1}), (True, {2})):
        made = [run for run in bench.made if ("gradient_sync" in run.settings) == compresses]
        assert {run.processes.hosts for run in made} == hosts, "only compression makes the number of hosts matter"


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


Runs = dict[str, list[dict[str, float]]]
EXACT = {NO_ONEDNN: "none here"}


def timed(seconds: float, *, plain: float = 100.0, loss: float = 3.0, **others: float) -> Runs:
    """Two seeds: the plain loop, everything, and other arms by their seconds, of the plain loop's loss."""

    def runs(of: float, heldout: float) -> list[dict[str, float]]:
        return [{"seconds": of * noise, "heldout_loss": heldout} for noise in (1.0, 1.01)]

    rest = {name: runs(of, 3.0) for name, of in others.items()}
    return {PLAIN: runs(plain, 3.0), FULL: runs(seconds, loss), **rest}


def verdict_on(found: dict[str, Runs], conditions: dict[str, str]) -> Verdict:
    """The verdict on the runs of each scene, by name."""
    tuned = {
        where: {name: Tuned(size=replace(SIZE, num_steps=50), loss=3.0) for name in arms}
        for where, arms in found.items()
    }
    compared = {
        where: {PLAIN: Run(size=SIZE, processes=Processes(hosts=2 if "two" in where else 1))} for where in found
    }
    made = measurement(found, tuned, compared)
    kept = {name: value for name, value in made.conditions.items() if name != NO_ONEDNN}
    return judge(CLAIM, replace(made, conditions=kept | conditions))


@pytest.mark.parametrize(
    ("one", "two", "loss", "kind"),
    [(20.0, 4.9, 3.0, "met"), (21.0, 4.9, 3.0, "short"), (20.0, 5.1, 3.0, "short"), (20.0, 4.9, 3.01, "short")],
)
def test_both_settings_have_to_reach_their_goal_at_no_higher_loss(one, two, loss, kind):
    scenes = {"one host": timed(one, loss=loss), "two hosts": timed(two, loss=loss)}
    found = verdict_on(scenes, EXACT)
    assert found.kind == kind
    assert found.figures["one host: faster, everything"].value == pytest.approx(100 / one)
    assert found.figures["two hosts: steps, everything"].value == 50


def test_the_fastest_plain_loop_has_to_be_beaten():
    """Rivals are the loop by oneDNN's products, and on two hosts by one of them that leaves the other idle."""
    fast = {PLAIN_BY_ONEDNN: 50.0}
    beaten = verdict_on({"one host": timed(19.0, **fast), "two hosts": timed(4.0, **fast)}, {})
    assert beaten.kind == "short"
    assert "one host: speed over the fastest plain loop (plain, products by oneDNN, one host) 2.63x" in beaten.reason
    assert beaten.figures["one host: faster than the fastest plain loop"].value == pytest.approx(50 / 19)
    assert verdict_on({"one host": timed(9.0, **fast), "two hosts": timed(2.0, **fast)}, {}).kind == "met"
    alone = verdict_on({"one host": timed(19.0, plain=99.0), "two hosts": timed(30.0, plain=700.0)}, EXACT)
    assert alone.figures["two hosts: faster, everything"].value == pytest.approx(700 / 30)
    assert "two hosts: speed over the fastest plain loop (plain, one host) 3.3x" in alone.reason
    assert alone.kind == "short"


def test_a_wide_model_is_compared_with_one_host_of_its_own_width():
    scenes = {where: timed(1.0) for where in ("one host", "two hosts")}
    wide = {"one host, wide": timed(10.0, plain=90.0), "two hosts, wide": timed(6.0, plain=600.0)}
    found = verdict_on(scenes | wide, EXACT)
    assert "two hosts, wide: speed over the fastest plain loop (plain, one host, wide) 15x" in found.reason


def test_products_by_onednn_have_to_be_measured_where_they_are_exact():
    scenes = {"one host": timed(19.0), "two hosts": timed(4.0)}
    lacking = verdict_on(scenes, {})
    assert lacking.line.startswith(
        "not judged: the record lacks samples 'one host: seconds, plain, products by oneDNN'"
    )


def test_one_setting_alone_does_not_meet_the_claim():
    found = verdict_on({"one host": timed(1.0)}, EXACT | {NO_NETWORK: "no root"})
    assert found.line.startswith("not judged: the record lacks two hosts: no root")


def test_the_plain_loop_by_onednn_is_tuned_with_the_plain_one(monkeypatch, tmp_path):
    bench = Bench(monkeypatch)
    monkeypatch.setattr(efficiency_20x, "onednn_is_exact", lambda: True)
    arms = arms_of("one host", SIZE)
    assert arms[PLAIN_BY_ONEDNN] == replace(arms[PLAIN], settings={"precision": {"fp32_matmul": "onednn"}})
    tuned = tune_arms(Setting(folder=tmp_path, quick=False, progress=SilentProgress()), arms)
    assert list(tuned) == list(arms)
    assert tuned[PLAIN_BY_ONEDNN] == tuned[PLAIN]
    assert not any(run.settings == {"precision": {"fp32_matmul": "onednn"}} for run in bench.made)


@pytest.mark.parametrize("onednn", [True, False])
def test_the_plain_loop_takes_the_products_that_it_is_told_to(monkeypatch, onednn):
    asked: list[bool] = []

    def products(*, onednn: bool) -> contextlib.AbstractContextManager[None]:
        asked.append(onednn)
        return contextlib.nullcontext()

    monkeypatch.setattr(plain_training, "fp32_products", products)
    config = Run(
        size=replace(SIZE, num_steps=1), settings={"precision": {"fp32_matmul": "onednn" if onednn else "default"}}
    ).train_config()
    train_plainly(make_decoder(), iter([padded_batch()]), config, num_steps=1, world=single())
    assert asked == [onednn]
