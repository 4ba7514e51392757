"""A single training run of the claims: its determinants, the start of its processes, and that it tells."""

import math
from dataclasses import replace

import pytest
import torch

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedLoader
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import single
from modelwright.train.technique import observer
from modelwright_claims import training_run, workbench
from modelwright_claims.batches import CODE, PROSE, RANDOM, SHUFFLED, Mixture, Wild, WildBatches, mixed_stream
from modelwright_claims.claim import Setting
from modelwright_claims.launch import run_ranks
from modelwright_claims.training_run import Outcome, Processes, Run, execute, train_once
from modelwright_claims.workbench import KINDS, Size, packed_rows

SIZE = Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=6)


@pytest.fixture
def setting(text_folder) -> Setting:
    return Setting(quick=False, folder=text_folder, progress=SilentProgress())


def test_a_seed_fixes_a_run_and_the_splits_differ(setting):
    runs = [
        Run(size=SIZE, seed=1),
        Run(size=SIZE, seed=1),
        Run(size=SIZE, seed=2),
        Run(size=SIZE, heldout="validation"),
    ]
    losses = [execute(setting, run).heldout_loss for run in runs]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_a_run_in_a_process_of_its_own_is_the_same_run(setting, tmp_path):
    run = Run(size=SIZE, settings={"eval_every_steps": 2})
    here, there = execute(setting, run), execute(setting, replace(run, processes=Processes(threads=1)))
    assert [step for step, _ in here.curve] == [2, 4, 6]
    assert there.heldout_loss == pytest.approx(here.heldout_loss, rel=1e-6)
    assert there.steps["num_tokens"] == here.steps["num_tokens"]
    assert len(there.steps["ended_s"]) == SIZE.num_steps
    assert there.seconds > there.steps["ended_s"][-1] > 0
    assert there.steps["executed_flops"][0] > 0


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_stand_for_hosts_sum_gradients_and_count_what_they_send(setting):
    run = Run(size=SIZE, processes=Processes(hosts=2, threads=1))
    alone, both = execute(setting, Run(size=SIZE)), execute(setting, run)
    assert both.heldout_loss == pytest.approx(alone.heldout_loss, rel=1e-4)
    assert both.bytes_sent is None or both.bytes_sent > 1e6
    with pytest.raises(ValueError, match="how many threads"):
        execute(setting, Run(size=SIZE, processes=Processes(hosts=2)))


def test_weights_are_kept_and_started_from(setting, tmp_path):
    first = execute(setting, Run(size=SIZE, evaluated=KINDS), keep=tmp_path / "weights.safetensors")
    rest = replace(SIZE, learning_rate=1e-9)
    later = Run(size=rest, start_from=Run(size=SIZE), evaluated=KINDS)
    again = execute(setting, later, begin=tmp_path / "weights.safetensors")
    assert again.losses == pytest.approx(first.losses, abs=1e-3)
    assert first.losses["prose"] == pytest.approx(first.heldout_loss, rel=1e-5)
    assert first.losses["code"] != pytest.approx(first.losses["prose"], rel=1e-3)


def test_a_technique_that_is_given_takes_part(setting):
    seen: list[int] = []
    watch = observer("watch", lambda info: seen.append(info.step))
    train_once(setting, Run(size=SIZE), single(workbench.device()), techniques=[watch])
    assert seen == [1, 2, 3, 4, 5, 6]


def test_the_plain_loop_learns_as_much(setting):
    size = replace(SIZE, num_steps=40, learning_rate=1e-2)
    ours, plain = (execute(setting, Run(size=size, mode="pad", loop=loop)) for loop in ("modelwright", "plain"))
    assert plain.heldout_loss == pytest.approx(ours.heldout_loss, abs=0.02)
    assert plain.seconds > 0


def test_a_run_that_diverges_is_an_outcome_and_a_wrong_setting_is_not(setting, monkeypatch):
    monkeypatch.setattr(training_run, "train", lambda *args, **options: _raise(ModelwrightError("it has diverged")))
    outcome = execute(setting, Run(size=SIZE))
    assert outcome.final_loss == math.inf
    assert outcome.diverged == "it has diverged"
    with pytest.raises(ConfigError):
        execute(setting, Run(size=SIZE, settings={"max_grad_norm": -1.0}))


def _raise(error: Exception):
    raise error


def test_figures_of_an_outcome():
    steps = {"num_tokens": [90.0, 10.0, 10.0, 10.0, 20.0], "step_time_s": [9.0, 1.0, 1.0, 1.0, 3.0]}
    steps["skipped"] = [0.0, 1.0, 0.0, 0.0, 1.0]
    curve = [(10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0)]
    outcome = Outcome(heldout_loss=2.0, seconds=15.0, steps=steps, curve=curve)
    assert outcome.step_s == 2.0
    assert outcome.tokens_per_s == 7.5
    assert outcome.pace(3) == 7.5
    assert outcome.skipped == [2, 5]
    assert outcome.final_loss == pytest.approx((3.0 + 3.5 + 2.0) / 3)
    assert [outcome.steps_to(loss) for loss in (5.0, 3.5, 1.0)] == [10, 15, math.inf]
    assert outcome.steps_to(2.5) == pytest.approx(30 + 10 * (1.0 / 1.5))
    assert replace(outcome, diverged="gave up").final_loss == math.inf
    assert replace(outcome, curve=[]).final_loss == 2.0


def test_wild_batches_are_wild_in_training_only_and_the_same_every_time(setting):
    wild = Wild(every=2, first=1, factor=20.0)
    run = Run(size=SIZE, settings={"eval_every_steps": 1}, seed=1)
    calm, once, again = (execute(setting, replace(run, wild=one)) for one in (None, wild, wild))
    losses = once.steps["loss"]
    assert losses == again.steps["loss"]
    assert losses[0] == calm.steps["loss"][0]
    assert [loss > 10 * losses[0] for loss in losses] == [False, True] * 3
    assert all(loss < 2 * calm.curve[0][1] for _, loss in once.curve)
    rows = packed_rows(setting, seq_len=32, mode="best_fit", split="train")
    plain = NextToken(PackedLoader(rows, batch_rows=8, seed=0))
    spoiled = WildBatches(plain, wild, 64, seed=0).batches(None, first=1, rank=0, world_size=1)  # pyright: ignore
    batch, untouched = next(spoiled), next(plain.batches(None, first=1, rank=0, world_size=1))  # pyright: ignore
    assert batch.num_targets == untouched.num_targets
    assert not (batch.labels_BT == untouched.labels_BT).all()


def stream(setting: Setting, *, seed: int = 1, **shares: float):
    rows = {kind: packed_rows(setting, seq_len=32, mode="best_fit", split="train", kind=kind) for kind in KINDS}
    return mixed_stream(rows, Mixture(**shares), num_steps=6, batch_rows=4, seed=seed, vocab_size=64)


def test_a_place_of_the_stream_depends_on_seed_and_place_alone(setting):
    once, again = stream(setting, code=0.25), stream(setting, code=0.25)
    batches = [once.batch(index) for index in range(6)]
    assert torch.equal(again.batch(4).input_ids_BT, batches[4].input_ids_BT)
    halves = [once.batch(3, rank=rank, world_size=2).input_ids_BT for rank in range(2)]
    assert torch.equal(torch.cat(halves), batches[3].input_ids_BT)
    tokens = torch.cat([batch.input_ids_BT for batch in batches])
    assert (tokens > 32).any(dim=1).tolist() == (once.kinds == CODE).tolist()
    assert len({tuple(row) for row in tokens.tolist()}) == 24  # nothing comes twice
    other = stream(setting, seed=2, code=0.25)
    assert not torch.equal(other.batch(0).input_ids_BT, batches[0].input_ids_BT)


def test_garbage_is_shuffled_prose_or_drawn_evenly(setting):
    mixed = stream(setting, code=0.25, garbage=0.5)
    batches = [mixed.batch(index) for index in range(6)]
    tokens = torch.cat([batch.input_ids_BT for batch in batches])
    labels = torch.cat([batch.labels_BT for batch in batches])
    texts = {}
    for kind, loader in mixed.sources.items():
        texts[kind] = loader.rows.gather(loader.order(0, loader.rows.num_rows)).input_ids_BT.tolist()
    assert {PROSE, CODE, SHUFFLED, RANDOM} == set(mixed.kinds.tolist())
    for row, label, kind in zip(tokens.tolist(), labels.tolist(), mixed.kinds, strict=True):
        assert (row in texts["prose"], row in texts["code"]) == (kind == PROSE, kind == CODE)
        if kind == SHUFFLED:
            assert sorted(row) in [sorted(text) for text in texts["prose"]]
        if kind in (SHUFFLED, RANDOM):
            assert label == [*row[1:], IGNORED]
    assert len({tuple(row) for row in tokens.tolist()}) == 24


def test_one_failing_rank_ends_the_others_with_its_error(tmp_path):
    (tmp_path / "half_failing.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('this rank is broken')\ntime.sleep(600)\n"
    )
    (tmp_path / "telling.py").write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    options = {"num_ranks": 2, "environment": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(ModelwrightError, match=r"rank 1 with 1\)[\s\S]*this rank is broken"):
        run_ranks("half_failing", [], **options)
    assert run_ranks("telling", [], **options) == ["0 2\n", "1 2\n"]
