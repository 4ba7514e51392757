"""The executed arena: its allocator against the twin, no two living tensors in one place, records, plans and misses."""

import itertools
import platform
import random
import resource
import shutil
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import memory_references
from memory_references import ReplayNaive
from modelwright.core.errors import ConfigError
from modelwright.memory import step_arena_runtime
from modelwright.memory.step_arena_build import built, check_machine
from modelwright.memory.step_arena_runtime import OUTLIVES, Figures, Mode, Planned, StepAllocator, StepArena, step_arena

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="is built on Linux, by g++"
)


@pytest.fixture
def used() -> Iterator[StepAllocator]:
    found = StepAllocator()
    yield found
    found.end()
    found.drop()
    assert found.living_bytes() == 0


def block(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def seen(used: StepAllocator) -> tuple[int, int, int]:
    found = used.figures()
    return found.num_served, found.num_missed, found.num_outliving


def random_steps(seed: int) -> tuple[list[Planned], list[list[int]]]:
    """A plan that is no good one (places overlap), and steps: positive numbers are sizes, others what to free."""
    draw = random.Random(seed)
    sizes = [64 * draw.randint(1, 12) for _ in range(400)]
    places = [draw.choice([OUTLIVES, *(64 * draw.randrange(200) for _ in range(9))]) for _ in sizes]
    planned = [
        Planned(size, place, place != OUTLIVES and draw.random() < 0.3)
        for size, place in zip(sizes, places, strict=True)
    ]
    steps = []
    for _ in range(4):
        step = []
        for size in sizes:
            if draw.random() < 0.9:
                step.append(size)
            if draw.random() < 0.1:
                step.append(64 * draw.randint(1, 14))
            step += [-draw.randrange(1000) for _ in range(draw.randint(0, 2))]
        steps.append(step)
    return planned, steps


@pytest.mark.parametrize("seed", range(3))
def test_replay_against_its_twin(used, seed):
    planned, steps = random_steps(seed)
    used.plan(planned, 64 * 220)
    twin, alive, base, outcomes = ReplayNaive(planned), [], None, set()
    for step in steps:
        used.begin(Mode.REPLAY, 1)
        twin.begin()
        for action in step:
            if action > 0:
                before = used.figures().num_served
                made, offset = block(action), twin.allocate(action)
                assert (used.figures().num_served > before) == (offset is not None)
                if offset is not None:
                    base = made.data_ptr() - offset if base is None else base
                    assert made.data_ptr() - base == offset
                alive.append((made, offset))
            elif alive:
                made, offset = alive.pop(-action % len(alive))
                if offset is not None:
                    twin.free(offset)
                del made
        assert seen(used) == (twin.num_served, twin.num_missed, twin.num_outliving)
        outcomes |= {index for index, number in enumerate(seen(used)) if number}
        used.end()
    assert outcomes == {0, 1, 2}
    alive.clear()


def fill(number: int, size: int) -> tuple[Tensor, int]:
    made = block(size)
    value = number % 251
    made.fill_(value)
    return made, value


def test_what_lives_keeps_its_values_whatever_the_steps_and_threads_do(used):
    """Patterns in every block; another thread frees a third of them, and allocates blocks of the same sizes.

    How many blocks a step serves depends on how soon that thread frees, so steps are repeated until enough were served.
    """
    planned, steps = random_steps(7)
    used.plan(planned, 64 * 220)
    handed, lock, done, wrong = [], threading.Lock(), threading.Event(), []

    def other() -> None:
        draw = random.Random(1)
        while not done.is_set() or handed:
            own, value = fill(draw.randrange(1000), 64 * draw.randint(1, 12))
            with lock:
                taken = handed.pop(draw.randrange(len(handed))) if handed else None
            if taken and not bool((taken[0] == taken[1]).all()):
                wrong.append(taken)
            if not bool((own == value).all()):
                wrong.append((own, value))

    thread = threading.Thread(target=other)
    thread.start()
    draw, alive, served = random.Random(2), [], 0
    for number, step in enumerate(itertools.cycle(steps)):
        if number >= 20 and served > 1000:
            break
        used.begin(Mode.REPLAY, 1)
        for action in step:
            if action > 0:
                alive.append(fill(number + action, action))
            elif alive:
                one = alive.pop(-action % len(alive))
                assert bool((one[0] == one[1]).all())
                if draw.random() < 0.3:
                    with lock:
                        handed.append(one)
        served += used.figures().num_served
        used.end()
    done.set()
    thread.join()
    assert not wrong
    assert all(bool((made == value).all()) for made, value in alive)
    alive.clear()


def work(sizes: list[int], keep: int | None = None) -> Tensor | None:
    """Every block lives until two further ones are made."""
    alive: list[Tensor] = []
    kept = None
    for number, size in enumerate(sizes):
        alive = [*alive[-2:], block(size).fill_(number)]
        kept = alive[-1] if number == keep else kept
    return kept


SIZES = [2**17 + 4096 * (n % 7) for n in range(40)]


def in_steps(arena: StepArena, number: int, sizes: list[int] = SIZES) -> list[dict[str, float]]:
    found = []
    for _ in range(number):
        with arena.step():
            work(sizes)
        found.append(arena.figures())
    return found


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def arena(used, notes) -> StepArena:
    return StepArena(used, notes.append)


def test_three_steps_are_recorded_and_the_next_ones_served(arena):
    found = in_steps(arena, 6)
    assert found[:3] == [{}, {}, {}]
    most = max(sum(SIZES[n : n + 4]) for n in range(len(SIZES)))
    for figures in found[3:]:
        assert figures["arena_hit_rate"] == 1.0
        assert figures["arena_peak_bytes"] <= figures["arena_bytes"] <= 1.25 * most


def test_pages_are_used_again(arena):
    in_steps(arena, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    in_steps(arena, 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200, "a step touches 1,500 pages"


def test_a_tensor_that_outlives_its_step_keeps_its_place_and_values(arena, used):
    in_steps(arena, 4)
    with arena.step():
        kept = work(SIZES, keep=20)
    assert kept is not None
    assert used.living_bytes() == SIZES[20]
    figures = in_steps(arena, 2)[-1]
    assert 0.5 < figures["arena_hit_rate"] < 1.0, "blocks that the plan has at its place are missed"
    assert bool((kept == 20).all())
    arena.close()
    assert bool((kept == 20).all())
    del kept
    assert used.living_bytes() == 0


def test_what_outlives_the_recorded_step_is_not_in_the_arena(arena, used):
    kept = []
    for _ in range(5):
        with arena.step():
            kept.append(work(SIZES, keep=20))
        assert used.living_bytes() == 0
    assert arena.figures()["arena_hit_rate"] == 1.0
    assert all(bool((one == 20).all()) for one in kept)


def test_other_steps_are_recorded_anew_and_futile_plans_end(arena, notes):
    in_steps(arena, 4)
    longer = [2 * size for size in SIZES]
    found = in_steps(arena, 7, longer)
    assert [one.get("arena_hit_rate") for one in found] == [0.0, 0.0, None, None, None, 1.0, 1.0]
    for number in range(30):
        in_steps(arena, 1, [size + 4096 * 50 * (number + 1) for size in SIZES])
    assert in_steps(arena, 3, longer) == [{}, {}, {}]
    (text,) = notes
    assert "differ" in text


def test_some_that_come_in_between_move_nothing_else(arena):
    in_steps(arena, 4)
    more = [size for n, size in enumerate(SIZES) for size in ([size, 70_000 + n] if n % 3 == 0 else [size])]
    (figures,) = in_steps(arena, 1, more)
    own = sum(70_000 + n for n in range(0, len(SIZES), 3))
    assert figures["arena_hit_rate"] > 0.8 * sum(SIZES) / (sum(SIZES) + own)


def test_sizes_that_vary_have_some_room(arena):
    draw = random.Random(0)
    for number in range(30):
        sizes = [2**17 if n % 4 else 2**18 - 64 * draw.randrange(200) for n in range(40)]
        (figures,) = in_steps(arena, 1, sizes)
        assert (figures.get("arena_hit_rate", 1.0) > 0.99) or number < 3


@pytest.mark.parametrize(("number", "skip"), [(0, 2), (1, 2), (9, 2), (9, 10**9)])
def test_what_comes_too_often_or_not_at_all_does_not_carry_the_step_away(used, monkeypatch, number, skip):
    """Small blocks that the plan has three of in each of forty layers; the large ones find their places all the same,
    unless (in the twin) there is no limit to what may be passed over."""

    def layers(number: int) -> list[int]:
        return [size for _ in range(40) for size in (2**20, *[2**16] * number, 2**19, 2**20 + 4096)]

    monkeypatch.setattr(memory_references, "SKIP", skip)
    places = itertools.accumulate(layers(3), initial=0)
    planned = [Planned(size, place) for size, place in zip(layers(3), places, strict=False)]
    used.plan(planned, sum(layers(3)))
    used.begin(Mode.REPLAY, 1)
    twin = ReplayNaive(planned)
    twin.begin()
    served, expected = set(), set()
    for n, size in enumerate(layers(number)):
        before = used.figures().num_served
        block(size)
        served |= {n} if used.figures().num_served > before else set()
        expected |= {n} if twin.allocate(size) is not None else set()
    large = {n for n, size in enumerate(layers(number)) if size > 2**16}
    assert large <= served
    assert (large <= expected) == (skip == 2)
    used.end()


def test_a_step_that_begins_again_is_recorded_anew(arena, used):
    in_steps(arena, 4)
    with arena.step():
        half = block(SIZES[0])
        arena.abandon()
        work([size // 2 for size in SIZES])
    del half
    found = in_steps(arena, 4, [size // 2 for size in SIZES])
    assert [one.get("arena_hit_rate") for one in found] == [None, None, 1.0, 1.0]


def test_an_error_amid_a_step_leaves_the_arena_usable(arena):
    in_steps(arena, 4)

    def fail() -> None:
        with arena.step():
            work(SIZES)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    outside = block(SIZES[0])
    assert in_steps(arena, 1)[0]["arena_hit_rate"] == 1.0
    del outside


def test_pages_go_back_while_the_arena_rests(arena):
    in_steps(arena, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with arena.resting():
        pass
    in_steps(arena, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 100
    assert in_steps(arena, 1)[0]["arena_hit_rate"] == 1.0


def test_an_arena_that_cannot_be_had_is_done_without(used, notes, monkeypatch):
    def plan(*_: object) -> None:
        raise OSError(12, "the arena's memory", "")

    monkeypatch.setattr(used, "plan", plan)
    arena = StepArena(used, notes.append)
    assert in_steps(arena, 5) == [{}] * 5
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        ("no-such-compiler", "step_arena.*set step_arena to false.*CXX"),
        ("false", "cannot be built with 'false'"),
    ],
)
def test_without_a_compiler_that_works_nothing_is_built(tmp_path, monkeypatch, compiler: str, text: str):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match=text):
        built(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_shows_before_anything_is_built(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="step_arena: is for CPUs"):
        step_arena(True, torch.device("cuda"), print).__enter__()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_machine(on_cpu=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="program not found"):
        check_machine(on_cpu=True)
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="requires Linux"):
        check_machine(on_cpu=True)


def test_it_is_built_once(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    first = built(tmp_path)
    made = first.stat().st_mtime_ns
    assert built(tmp_path).stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [first]


def test_shares_of_nothing():
    empty = dict.fromkeys(Figures.__dataclass_fields__, 0)
    assert Figures(**empty).served_share == 1.0
    assert step_arena_runtime.LEAST_BYTES % 4096 == 0
