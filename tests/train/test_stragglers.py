"""A slow rank is named once, with its host, and once more when it keeps up again."""

import pytest
import torch

from modelwright.parallel.mesh import World, single
from modelwright.train.monitors.stragglers import OwnTime, SpeedProbe, StragglerConfig, Stragglers
from modelwright.train.technique import StepInfo
from refusals import config_error

STEP = StepInfo(
    step=1, loss=0, losses={}, grad_norm=0, learning_rate=0, num_tokens=0, tokens_per_s=0, mfu=0, data_wait_s=0,
    comm_s=0, step_time_s=0, bytes_sent=0,
)  # fmt: skip


@pytest.fixture
def watched():
    events = []
    watch = Stragglers(
        single(), StragglerConfig(factor=1.5, patience=3), own_time_s=lambda: 1.0, report=lambda *e: events.append(e)
    )
    watch.hosts, watch._num_looks = ["a", "a", "b", "b"], [0] * 4
    return watch, events


def test_slow_rank_is_named_after_enough_looks(watched):
    watch, events = watched
    for step in range(1, 6):
        watch.judge(step, [1.0, 1.1, 1.0, 2.0])
    assert events == [(3, "straggler", 2.0, 1.5750000000000002, "rank 3 on b computes 1.9 times as long as the median")]
    assert watch._num_looks == [0, 0, 0, 5]


def test_one_slow_look_is_nothing(watched):
    watch, events = watched
    for step in range(1, 30):
        watch.judge(step, [1.0, 1.0, 9.0 if step % 3 else 1.0, 1.0])
    assert events == []


def test_recovery_is_told(watched):
    watch, events = watched
    for slow in (2.0, 2.0, 2.0, 1.0, 1.0):
        watch.judge(7, [slow, 1.0, 1.0, 1.0])
    assert [event[-1] for event in events] == [
        "rank 0 on a computes 2.0 times as long as the median",
        "rank 0 on a keeps up again",
    ]


def test_others_than_the_first_rank_keep_silent(watched):
    watch, events = watched
    watch.world = World(rank=1, size=4, device=torch.device("cpu"))
    for step in range(5):
        watch.judge(step, [1.0, 1.0, 1.0, 2.0])
    assert events == []
    assert watch._num_looks == [0, 0, 0, 5]


def test_one_process_is_never_a_straggler():
    events = []
    watch = Stragglers(single(), StragglerConfig(), own_time_s=lambda: 5.0, report=lambda *e: events.append(e))
    for _ in range(4):
        watch.look(STEP.step)
    assert events == []


def test_own_time_is_the_mean_since_it_was_last_asked():
    own = OwnTime()
    own.add_step(1.0)
    own.add_step(3.0)
    assert own() == 2.0
    assert own() == 0.0


def test_probe_takes_time():
    assert 0 < SpeedProbe(torch.device("cpu"))() < 1


def test_bad_limits_are_refused():
    with config_error("factor", match=r"^factor: "):
        StragglerConfig(factor=1.0)
    with config_error("patience"):
        StragglerConfig(patience=0)
