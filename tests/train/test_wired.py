"""What the configuration of a run switches on really takes part in it: two processes, through THE loop."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import wired_run

from distributed import Exit, start_distributed
from modelwright.core.config import ConfigError
from modelwright.core.records import column, read_records
from modelwright.parallel.mesh import ParallelConfig
from modelwright.train.config import TrainConfig, check_layout
from wired_cases import COPIES, RARE, Runs, case, ended, losses, weights

pytestmark = pytest.mark.slow

LOCAL = {
    "kind": "topk_quantized",
    "topk_quantized": {"topk_fraction": 0.25, "bucket_numel": 4096},
    "local_sgd": {"sync_every_steps": 3},
}
OWN = {**LOCAL, "local_sgd": {"sync_every_steps": 3, "keep_residual": True, "outer_momentum": 0.5}}
MOMENTS = {**LOCAL, "local_sgd": {"sync_every_steps": 1, "sync_second_moment_every": 1}}
SIX_LAYERS = {"num_layers": 6}
TIED = {"tie_embeddings": True}
CHECKED = {"fault_tolerance": {"replica_check_every_steps": 1}}


CASES = [
    case("exact", **COPIES),
    case("one-copy", settings=CHECKED),
    case("one-copy-parts", settings={"gradient_accumulation_steps": 2}),
    case("one-copy-stopped", "one-copy-twice", mishap={"kind": "stop", "step": 5}),
    case("one-copy-again", "one-copy-twice"),
    case("apart", "one-copy-apart", mishap={"kind": "stop", "step": 7}),
    case("apart-again", "one-copy-apart", **COPIES),
    case("one-copy-skipped", mishap={"kind": "nan", "step": 3}),
    case("skipped", mishap={"kind": "nan", "step": 3}, **COPIES),
    case("checked-copies", settings=CHECKED, **COPIES),
    case("host", settings={"optimizer_cpu_offload": True}),
    case(
        "host-stopped",
        "host-twice",
        settings={"optimizer_cpu_offload": True},
        parallel={"zero_stage": 3},
        mishap={"kind": "stop", "step": 5},
    ),
    case("host-again", "host-twice", settings={"optimizer_cpu_offload": True}),
    case(
        "planned",
        settings={
            "gradient_sync": {"kind": "topology_aware", "topology": {"algorithm": "ring", "window_all_reduces": 4}}
        },
    ),
    case("int8", settings={"gradient_sync": {"kind": "int8"}}),
    case("powersgd", settings={"gradient_sync": {"kind": "powersgd", "powersgd_rank": 2}}),
    case("averaging", settings={"gradient_sync": {"local_sgd": {"sync_every_steps": 3}}, **RARE}),
    case("local", settings={"gradient_sync": LOCAL, **RARE}),
    case("own", settings={"gradient_sync": OWN, **RARE}),
    case("skipped-moments", settings={"gradient_sync": MOMENTS, **RARE}, mishap={"kind": "nan", "step": 0}),
    case("own-stopped", "own-twice", settings={"gradient_sync": OWN, **RARE}, mishap={"kind": "stop", "step": 7}),
    case("own-again", "own-twice", settings={"gradient_sync": OWN, **RARE}),
    case("late", settings={"async_updates": {"mode": "delayed", "delay_steps": 2}, "gradient_sync": {"kind": "int8"}}),
    case("sharded-local", settings={"gradient_sync": LOCAL, **CHECKED, **RARE}, parallel={"tensor": 2}),
    case("checked-local", settings={"gradient_sync": OWN, **CHECKED, **RARE}),
    case("checked-tensor", settings=CHECKED, parallel={"tensor": 2}),
    case("checked-plain-tensor", settings=CHECKED, parallel={"tensor": 2, "sequence_parallel": False}),
    case("checked-context", settings=CHECKED, parallel={"context": 2}),
    case("checked-zero", settings=CHECKED, parallel={"zero_stage": 3}),
    case("checked-tied", settings={**CHECKED, "gradient_accumulation_steps": 2}, parallel={"pipeline": 2}, shape=TIED),
    case(
        "flipped",
        settings={"fault_tolerance": {"replica_check_every_steps": 2}},
        mishap={"kind": "flip", "step": 4, "rank": 1},
        **COPIES,
    ),
    case(
        "wild",
        settings={"loss_spikes": {"num_sigmas": 6.0, "window_steps": 6, "min_norm_rise": 4.0}, "num_steps": 15},
        mishap={"kind": "wild", "step": 10},
    ),
    case("tokens", settings={"load_balance": {"tokens": True}, "gradient_accumulation_steps": 2}),
    case(
        "uneven",
        settings={
            "load_balance": {"pipeline": True, "window_steps": 3},
            "gradient_accumulation_steps": 4,
            "checkpoint_every_steps": 4,
            "num_steps": 24,
        },
        parallel={"pipeline": 2, "layers_per_stage": [5, 1]},
        shape=SIX_LAYERS,
    ),
    case(
        "even", settings={"gradient_accumulation_steps": 4, "num_steps": 24}, parallel={"pipeline": 2}, shape=SIX_LAYERS
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("wired"), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "powersgd", "averaging", "local", "own"])
def test_a_transport_of_the_configuration_sends_less_and_still_learns(runs, name):
    exact, found = ended(runs, "exact"), ended(runs, name)
    assert 0 < found["bytes_sent"] < 0.5 * exact["bytes_sent"]  # sums of a few values are a tenth of all
    assert losses(runs, name)[-1] < losses(runs, name)[0] - 0.5
    assert losses(runs, name) != losses(runs, "exact")
    first, second = weights(runs, name), weights(runs, name, rank=1)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_processes_that_share_memory_make_the_updates_of_those_with_copies(runs):
    assert losses(runs, "one-copy-parts") == pytest.approx(losses(runs, "exact"), rel=1e-5)
    assert losses(runs, "one-copy") == pytest.approx(losses(runs, "exact"), rel=1e-5)
    assert losses(runs, "one-copy-skipped")[4:] == pytest.approx(losses(runs, "skipped")[4:], rel=1e-5)
    assert 0 < ended(runs, "one-copy")["bytes_sent"] < 0.4 * ended(runs, "exact")["bytes_sent"]  # sums of a few values
    first, second, apart = weights(runs, "one-copy"), weights(runs, "one-copy", rank=1), weights(runs, "exact")
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key
        torch.testing.assert_close(weight, apart[key], rtol=1e-4, atol=1e-4)


def test_a_run_on_one_copy_that_stops_ends_with_the_same_bits_and_goes_on_with_copies(runs):
    once, again = weights(runs, "one-copy"), weights(runs, "one-copy-again", rank=1)
    assert ended(runs, "one-copy-stopped")["kind"] == ended(runs, "apart")["kind"] == "Stopped"
    assert losses(runs, "one-copy-twice") == losses(runs, "one-copy")
    assert losses(runs, "one-copy-apart") == pytest.approx(losses(runs, "exact"), rel=1e-5)
    assert all(torch.equal(once[key], again[key]) for key in once)
    wait_until_gone(set(Path("/dev/shm").glob("modelwright-*")))


def wait_until_gone(files: set[Path], timeout_s: float = 60) -> None:
    """Fail if one of these files stays. Other tests, which run at the same time, have such files for a moment."""
    deadline = time.monotonic() + timeout_s
    while left := [path for path in files if path.is_file()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_states_on_the_host_change_nothing_and_go_from_layout_to_layout(runs):
    """Stopped as ZeRO-3 over both ranks, finished with whole copies."""
    assert losses(runs, "host") == pytest.approx(losses(runs, "exact"), rel=1e-5)
    assert ended(runs, "host-stopped")["kind"] == "Stopped"
    assert losses(runs, "host-twice") == pytest.approx(losses(runs, "exact"), rel=1e-5)


def test_planned_sums_are_exact(runs):
    assert losses(runs, "planned") == pytest.approx(losses(runs, "exact"), rel=1e-5)


@pytest.mark.slow
def test_moments_are_not_shared_before_a_step_has_made_them(runs):
    """The first update is skipped, because its loss is not a number; the ranks meet after it all the same."""
    assert ended(runs, "skipped-moments")["error"] == ""
    assert ended(runs, "skipped-moments")["events"]["nonfinite_step"] == 1


def test_a_run_that_stops_between_meetings_ends_with_the_same_bits(runs):
    assert ended(runs, "own-stopped")["kind"] == "Stopped"
    assert "after step 8" in ended(runs, "own-stopped")["error"]
    once, twice = weights(runs, "own"), weights(runs, "own-again")
    assert all(torch.equal(once[key], twice[key]) for key in once)
    assert losses(runs, "own-twice") == losses(runs, "own")


def test_gradients_come_late_through_the_configured_transport(runs):
    first, second, third = losses(runs, "late")[:3]
    assert losses(runs, "late")[0] == losses(runs, "exact")[0]
    assert first != second != third  # other batches, but the weights of the beginning: nothing has arrived yet
    assert abs(third - first) < 0.05
    assert losses(runs, "late")[-1] < first - 0.2
    assert 0 < ended(runs, "late")["bytes_sent"] < 0.5 * ended(runs, "exact")["bytes_sent"]


def test_ranks_that_hold_parts_of_one_model_have_nobody_to_meet(runs):
    """Tensor parallel over both ranks: one copy of the model, so local steps change nothing."""
    assert losses(runs, "sharded-local") == pytest.approx(losses(runs, "exact"), rel=1e-5)


@pytest.mark.slow
def test_a_flipped_bit_ends_the_run_on_all_ranks_and_names_the_tensor(runs):
    for rank in range(2):
        found = ended(runs, "flipped", rank)
        assert found["kind"] == "ReplicaError"
        assert "embedding.weight on ranks [0, 1]" in found["error"]
        assert found["error"].startswith("step 4")


@pytest.mark.slow
@pytest.mark.parametrize("name", [one["name"] for one in CASES if one["name"].startswith("checked-")])
def test_no_layout_is_taken_for_corrupt(runs, name):
    for rank in range(2):
        assert ended(runs, name, rank)["error"] == ""
    assert not list(runs.folder(name).glob("hang-*"))


@pytest.mark.slow
def test_a_wild_batch_is_left_out_and_recorded(runs):
    (line,) = (runs.folder("wild") / "loss_spikes.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"batches": [10, 10], "kind": "spike"}.items()
    assert ended(runs, "wild")["events"] == {"skipped_spike": 1}
    (event,) = read_records(runs.folder("wild") / "anomalies.jsonl")
    assert (event["step"], event["kind"]) == (11, "skipped_spike")
    assert losses(runs, "wild")[11] < 2 * losses(runs, "wild")[9]


@pytest.mark.slow
def test_rows_in_another_order_change_nothing_but_rounding(runs):
    assert losses(runs, "tokens") == pytest.approx(losses(runs, "exact"), rel=1e-5)


@pytest.mark.slow
def test_layers_move_between_uneven_stages_at_a_checkpoint_and_the_run_stays_the_same(runs):
    moves = [note for note in ended(runs, "uneven")["notes"] if "the stages hold" in note]
    assert moves
    assert moves[0].endswith("instead of (5, 1)")
    assert losses(runs, "uneven") == pytest.approx(losses(runs, "even"), rel=1e-5)
    first, second = weights(runs, "uneven"), weights(runs, "uneven", rank=1)
    assert all(torch.equal(first[key], second[key]) for key in first)


def trouble(tmp_path: Path, **rest: Any) -> tuple[list[Exit], Path]:
    """A run that does not end well, on two processes; what became of them, and the run's folder."""
    ranks = start_distributed(wired_run.run_cases, 2, tmp_path, [case("one", "run", **rest)])
    return ranks.wait(), tmp_path / "run"


def test_a_rank_that_hangs_ends_with_its_stacks_on_disk(tmp_path):
    guards = {"fault_tolerance": {"watchdog_timeout_s": 3.0}}
    found, folder = trouble(tmp_path, settings=guards, mishap={"kind": "hang", "step": 4, "rank": 1})
    assert [rank.code for rank in found] == [1, 1]
    assert "in observe" in (folder / "hang-1.txt").read_text()


def test_a_killed_run_goes_on_from_memory_and_its_recovery_is_recorded(tmp_path):
    """Nothing is on disk yet when a rank dies; the copies in memory are of step 6."""
    settings = {
        "settings": {
            **RARE,
            "fault_tolerance": {"in_memory_checkpoint_every_steps": 3, "watchdog_timeout_s": 10.0},
            "num_steps": 40,
        }
    }
    found, folder = trouble(tmp_path, **settings, mishap={"kind": "die", "step": 20, "rank": 1})
    assert found[1].code == -9
    assert not list((folder / "checkpoints").glob("step-*"))
    found, folder = trouble(tmp_path, **settings)
    assert [rank.code for rank in found] == [0, 0], found
    notes = json.loads((folder / "one-0.json").read_text())["notes"]
    went_on = next(int(note.split()[1]) for note in notes if "in the memory of the hosts" in note)
    assert went_on in (15, 18)
    (recovery,) = read_records(folder / "recoveries.jsonl")
    assert recovery["step"] == went_on + 1
    assert 0 <= recovery["steps_lost"] <= 5
    assert [step for step, _ in column(read_records(folder / "metrics.jsonl"), "loss")] == list(range(1, 41))
    assert not (folder / "recoveries.jsonl.alive").exists()


@pytest.mark.parametrize(
    ("transport", "asynchronous", "parallel", "field"),
    [
        ({"local_sgd": {"sync_every_steps": 2}}, {"mode": "delayed"}, {}, "gradient_sync.local_sgd.sync_every_steps"),
        ({"local_sgd": {"sync_every_steps": 2}}, {}, {"context": 2}, "gradient_sync.local_sgd.sync_every_steps"),
        ({"kind": "int8"}, {"mode": "hogwild"}, {}, "gradient_sync.kind"),
        ({}, {"mode": "hogwild"}, {"tensor": 2}, "async_updates.mode"),
        ({}, {"mode": "hogwild"}, {"zero_stage": 3}, "async_updates.mode"),
    ],
)
def test_what_does_not_go_together_is_named(tiny, transport, asynchronous, parallel, field):
    def check() -> None:
        config = tiny.settings(gradient_sync=transport, async_updates=asynchronous, **RARE)
        check_layout(config, ParallelConfig(**parallel), num_processes=2)

    with pytest.raises(ConfigError, match=rf"^{field}: "):
        check()


TRANSPORTS = [{"kind": "int8"}, {"kind": "topology_aware"}, {"kind": "allreduce", "local_sgd": {"sync_every_steps": 2}}]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_transport_that_fsdp_would_ignore_is_refused(tiny, transport, shard):
    config = tiny.settings(gradient_sync=transport, **RARE)
    name = "gradient_sync.local_sgd.sync_every_steps" if "local_sgd" in transport else "gradient_sync.kind"
    for layout, num_processes in (({}, 2), ({"shard_group_size": 4}, 4), ({"tensor": 2}, 4)):
        with pytest.raises(
            ConfigError, match=rf"^{name}: .*needs gradients that are .* parallel.zero_stage {shard} takes"
        ):
            check_layout(config, ParallelConfig(zero_stage=shard, **layout), num_processes=num_processes)


@pytest.mark.parametrize(
    ("layout", "num_processes"),
    [({"zero_stage": 3, "shard_group_size": 2}, 4), ({"zero_stage": 3}, 1), ({"tensor": 2}, 2), ({}, 4)],
)
def test_a_transport_is_taken_where_copies_exchange_gradients_or_nobody_does(tiny, layout, num_processes):
    config = tiny.settings(gradient_sync={"kind": "int8", "local_sgd": {"sync_every_steps": 2}}, **RARE)
    check_layout(config, ParallelConfig(**layout), num_processes=num_processes)


def test_training_refuses_a_transport_under_full_sharding(tmp_path):
    parallel = {"zero_stage": 3}
    found, folder = trouble(tmp_path, settings={"gradient_sync": {"kind": "int8"}, **RARE}, parallel=parallel)
    assert [rank.code for rank in found] == [0, 0]
    ended = json.loads((folder / "one-1.json").read_text())
    assert ended["kind"] == "ConfigError"
    assert ended["error"].startswith("gradient_sync.kind: int8 needs gradients that are summed over ranks")


def test_evaluation_and_checkpoints_fall_on_meetings(tiny):
    meetings = {"gradient_sync": {"local_sgd": {"sync_every_steps": 4}}}
    for name in ("eval_every_steps", "checkpoint_every_steps"):
        with pytest.raises(ConfigError, match=rf"^{name}: 6 must be a multiple"):
            tiny.settings(**meetings, **{**RARE, name: 6})
    assert isinstance(tiny.settings(**meetings, **{**RARE, "eval_every_steps": 8}), TrainConfig)
