"""Token budgets, curricula and mixtures: against naive twins, and the same batches for any number of ranks."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from modelwright.core.config import parse
from modelwright.data.rows.batch import LENGTH_MULTIPLE, cut, padded_len
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import (
    BatchingConfig,
    CurriculumConfig,
    Mixture,
    MixtureConfig,
    Pacing,
    RowOrder,
    apportion,
    uniform,
)
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from refusals import config_error

SEQ_LEN, BATCH_ROWS = 64, 16
ALL = {
    "by_tokens": True,
    "curriculum": {"by": "length", "fraction": 0.4},
    "mixture": {"weights": {"a": 1, "b": 2, "c": 3}, "update": "linear"},
}


def packed(folder: Path, count: int = 900, mode="one_per_row") -> PackedRows:
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(np.arange(number, number + rng.integers(2, SEQ_LEN)), None, "abc"[number % 7 % 3], float(number))
        for number in range(2, count + 2)
    ]
    pack(sequences, folder, PackConfig(seq_len=SEQ_LEN, mode=mode), vocab_size=10_000, eos_id=1)
    return PackedRows(folder)


def loader_of(rows: PackedRows, *, by_tokens: bool = False, num_steps: int = 200, **settings) -> PlannedLoader:
    loader = build_loader(
        rows, parse(BatchingConfig, settings, constants=True), batch_rows=BATCH_ROWS, by_tokens=by_tokens, seed=3,
        num_steps_of=lambda per_epoch: num_steps,
        row_losses=lambda: np.arange(rows.num_rows)[::-1],
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    return loader


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> PackedRows:
    return packed(tmp_path_factory.mktemp("rows"))


def naive_cut(lengths: list[int], budget: int, longest: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while lengths:
        width = min(-(-lengths[0] // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)
        fitting = 1
        while fitting < len(lengths) and (fitting + 1) * width <= budget:
            fitting += 1
        batches.append(lengths[:fitting])
        lengths = lengths[fitting:]
    return batches


@pytest.mark.parametrize("seed", range(8))
def test_batches_stay_within_the_budget_and_equal_the_naive_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(2, 300, size=int(rng.integers(1, 400))))[::-1]
    budget = int(rng.integers(300, 3000)) * (1 + 9 * (seed % 2))
    ends = cut(lengths, budget, 300)
    parts = np.split(lengths, ends[:-1])
    assert [part.tolist() for part in parts] == naive_cut(lengths.tolist(), budget, 300)
    for part in parts:
        assert len(part) * padded_len(int(part[0]), 300) <= budget or len(part) == 1


def test_an_epoch_with_a_token_budget_reads_every_row_once_with_little_padding(rows: PackedRows) -> None:
    loader = loader_of(rows, by_tokens=True)
    seen: list[int] = []
    padded = real = 0
    index = 0
    num_blocks = -(-rows.num_rows // loader.block_rows)
    while len(seen) < num_blocks * loader.block_rows:
        batch = loader.batch(index)
        assert batch.num_tokens <= BATCH_ROWS * SEQ_LEN
        padded, real = padded + batch.num_tokens, real + int((batch.segments_BT >= 0).sum())
        seen += loader.share(index).groups.tolist()
        index += 1
    assert set(seen) == set(range(rows.num_rows))
    assert sorted(Counter(seen).values())[-1 - (len(seen) - rows.num_rows)] == 1  # the next epoch has begun
    assert 1 - real / padded < 0.18  # of which 12% are due to `LENGTH_MULTIPLE`: rows have 33 tokens on average
    assert rows.num_tokens / (rows.num_rows * SEQ_LEN) < 0.6  # whole rows
    assert abs(index - loader.num_batches_per_epoch) <= 0.15 * loader.num_batches_per_epoch


def rows_read(shares) -> list[tuple[int, ...]]:
    """The tokens of the rows of a batch, without padding, in the order that its shares are dealt in."""
    read: dict[int, tuple[int, ...]] = {}
    for rank, share in enumerate(shares):
        for place, (ids, segments) in enumerate(zip(share.input_ids_BT, share.segments_BT, strict=True)):
            if int(segments[0]) >= 0:
                read[place * len(shares) + rank] = tuple(ids[segments >= 0].tolist())
    return [read[place] for place in sorted(read)]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_same_batches_after_a_resume_at_any_step_on_any_number_of_ranks(rows: PackedRows, adapted: bool) -> None:
    settings = {**ALL, "mixture": {"weights": {"a": 1, "b": 2, "c": 3}, "update": "heldout_loss"}} if adapted else ALL
    whole = loader_of(rows, **settings)
    states, batches = [], []
    for index in range(120):
        if adapted and index % 10 == 0 and index:
            whole.mixture.update(index, np.roll([0.5, 0.2, 0.3], index // 10))
        states.append(whole.mixture.state_dict())
        batches.append(rows_read([whole.batch(index)]))
    for seed, world_size in enumerate((1, 2, 4)):
        first = int(np.random.default_rng(seed).integers(20, 90))
        ranks = [loader_of(rows, **settings) for _ in range(world_size)]
        for loader in ranks:
            loader.mixture.load_state_dict(states[first])
        for index in range(first, 120):
            if adapted and index % 10 == 0 and index > first:
                for loader in ranks:
                    loader.mixture.update(index, np.roll([0.5, 0.2, 0.3], index // 10))
            shares = [loader.batch(index, rank=rank, world_size=world_size) for rank, loader in enumerate(ranks)]
            assert rows_read(shares) == batches[index]
            tokens = [int((share.segments_BT >= 0).sum()) for share in shares]
            if len(batches[index]) >= 4 * world_size:
                assert max(tokens) - min(tokens) <= SEQ_LEN


def test_ranks_without_a_row_get_padding(rows: PackedRows) -> None:
    loader = loader_of(rows, by_tokens=True)
    index = min(range(30), key=lambda index: len(loader.share(index).groups))
    num_rows = len(loader.share(index).groups)
    share = loader.batch(index, rank=num_rows, world_size=num_rows + 1)
    assert (share.num_rows, share.num_targets) == (1, 0)


def test_unequal_shares_of_whole_rows_are_refused(rows: PackedRows) -> None:
    loader = loader_of(rows, curriculum={"by": "length"})
    joined = [row for rank in range(4) for row in loader.batch(5, rank=rank, world_size=4).input_ids_BT.tolist()]
    assert joined == loader.batch(5).input_ids_BT.tolist()
    with config_error("batch_rows"):
        loader.batch(0, world_size=3)


def test_going_back_gives_the_same_batch(rows: PackedRows) -> None:
    loader = loader_of(rows, **ALL)
    read = [loader.share(index).groups.tolist() for index in range(60)]
    for index in (59, 3, 40, 41, 0):
        assert loader.share(index).groups.tolist() == read[index]


def test_the_default_is_todays_loader(rows: PackedRows) -> None:
    loader = build_loader(
        rows,
        BatchingConfig(),
        batch_rows=4,
        by_tokens=False,
        seed=3,
        num_steps_of=lambda n: n,
        row_losses=lambda: np.zeros(0),
    )
    assert isinstance(loader, PackedLoader)


# Curriculum


def test_competence_is_that_of_the_paper() -> None:
    config = CurriculumConfig(by="length", fraction=0.5, initial_competence=0.04)
    for step in (0, 1, 30, 99, 100, 150):
        growth = step / 100
        expected = np.sqrt(growth * (1 - 0.04**2) + 0.04**2)
        assert Pacing(config, 200).competence(step) == pytest.approx(min(1.0, expected), rel=1e-12)
    assert Pacing(CurriculumConfig(), 200).competence(0) == 1.0


@pytest.mark.parametrize("by", ["length", "quality", "loss:models/small"])
def test_rows_come_from_the_easiest_fraction(rows: PackedRows, by: str) -> None:
    loader = loader_of(rows, curriculum={"by": by, "fraction": 1.0})
    difficulty = {
        "length": rows.group_lengths(), "quality": rows.group_scores(),
        "loss:models/small": np.arange(rows.num_rows)[::-1],
    }[by]  # fmt: skip
    for index in range(0, 200, 7):
        num_easy = max(1, int(loader.pacing.competence(index) * rows.num_rows))
        assert difficulty[loader.share(index).groups].max() <= np.sort(difficulty)[num_easy - 1]


def test_draws_are_even_and_depend_on_their_number_alone() -> None:
    numbers = np.arange(100_000)
    values = uniform(5, numbers)
    assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(10_000, rel=0.05)
    assert np.array_equal(values[[7, 99]], uniform(5, np.array([7, 99])))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    order = RowOrder(np.arange(10), np.arange(10)[::-1], seed=1)
    assert set(order.draw(np.arange(100), 0.2).tolist()) == {8, 9}
    epochs = order.draw(np.arange(30), 1.0).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())


# Mixture


def naive_counts(shares: list[Fraction], num_rows: int, num_blocks: int) -> list[list[int]]:
    """Each block gives whole rows of what is owed; the largest remainders get the rest."""
    owed, result = [Fraction(0)] * len(shares), []
    for _ in range(num_blocks):
        owed = [debt + share * num_rows for debt, share in zip(owed, shares, strict=True)]
        counts = [max(0, int(debt // 1)) for debt in owed]
        while sum(counts) > num_rows:
            least = min((s for s in range(len(counts)) if counts[s]), key=lambda s: owed[s] - counts[s])
            counts[least] -= 1
        by_remainder = sorted(range(len(counts)), key=lambda s: counts[s] - owed[s])
        for source in by_remainder[: num_rows - sum(counts)]:
            counts[source] += 1
        owed = [debt - count for debt, count in zip(owed, counts, strict=True)]
        result.append(counts)
    return result


def test_counts_equal_the_naive_ones_and_never_drift() -> None:
    shares = [Fraction(5, 64), Fraction(17, 64), Fraction(42, 64)]  # exact in binary
    owed, given, real = np.zeros(3), np.zeros(3), []
    for _ in range(300):
        owed = owed + np.array([float(share) for share in shares]) * 7
        counts = apportion(owed, 7)
        owed, given = owed - counts, given + counts
        real.append(counts.tolist())
        target = np.array([float(share) for share in shares]) * 7 * len(real)
        assert np.abs(given - target).max() < 1.0
    assert real == naive_counts(shares, 7, 300)


@pytest.mark.parametrize("seed", range(10))
def test_counts_for_shares_that_change(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_sources, num_rows = int(rng.integers(1, 12)), int(rng.integers(1, 40))
    owed = np.zeros(num_sources)
    for _ in range(200):
        shares = rng.dirichlet(np.full(num_sources, 0.2))
        owed = owed + shares * num_rows
        counts = apportion(owed, num_rows)
        owed = owed - counts
        assert counts.sum() == num_rows
        assert counts.min() >= 0
        assert np.abs(owed).max() < num_sources + 1


def test_shares_follow_weights_temperature_and_schedule() -> None:
    def shares(batch: int = 0, **settings) -> list[float]:
        return Mixture(MixtureConfig(**settings), ["a", "b"], [900, 100], num_steps=11).shares(batch).tolist()

    assert shares() == pytest.approx([0.9, 0.1])
    assert shares(temperature=2.0) == pytest.approx([0.75, 0.25])
    assert shares(weights={"a": 1, "b": 4}) == pytest.approx([0.2, 0.8])
    assert shares(weights={"b": 4}) == [0.0, 1.0]
    moving = {"weights": {"b": 1}, "update": "linear"}
    assert [shares(batch, **moving)[1] for batch in (0, 5, 10, 99)] == pytest.approx([0.1, 0.55, 1.0, 1.0])


def test_each_batch_has_its_share_of_every_source(rows: PackedRows) -> None:
    loader = loader_of(rows, mixture={"weights": {"a": 1, "b": 1, "c": 2}})
    for index in range(30):
        source = np.searchsorted(np.cumsum(list(rows.sources.values())), loader.share(index).groups, side="right")
        drawn = dict(zip(rows.sources, np.bincount(source, minlength=3).tolist(), strict=True))
        assert drawn == {"a": 4, "b": 4, "c": 8}


def test_rows_of_a_source_are_all_read_before_one_is_read_again(rows: PackedRows) -> None:
    loader = loader_of(rows, mixture={"weights": {"a": 1, "b": 1, "c": 2}})
    drawn: Counter[int] = Counter()
    for index in range(rows.sources["c"] // 8):
        drawn.update(loader.share(index).groups.tolist())
    assert {drawn[row] for row in rows.source_groups("c")[: rows.sources["c"] // 8 * 8]} <= {0, 1}


def test_settings_are_checked(rows: PackedRows) -> None:
    with config_error(
        "batching.mixture.weights", match=r"weights: unknown source 'd'; the packed rows have 'c', 'a', 'b'|'d'"
    ):
        loader_of(rows, mixture={"weights": {"d": 1.0}})
    with config_error("temperature", match="temperature: must be above 0"):
        MixtureConfig(temperature=0.0)
    with config_error("update"):
        MixtureConfig(update="linear")
    with config_error("weights"):
        MixtureConfig(weights={"a": -1.0, "b": 2.0})
    with config_error("by"):
        CurriculumConfig(by="loss")


def test_the_settings_say_what_rows_must_be_packed_with() -> None:
    assert [CurriculumConfig(by=by).score for by in ("none", "length", "loss:a/b", "quality")] == [
        "",
        "",
        "",
        "quality",
    ]
    assert CurriculumConfig(by="loss:a/b").model == "a/b"
    kinds, sources = MixtureConfig(weights={"code": 2.0}), MixtureConfig(weights={"code": 2.0, "a.txt": 1.0})
    groups = [config.group_by for config in (MixtureConfig(), kinds, sources, MixtureConfig(temperature=2.0))]
    assert groups == ["none", "kind", "source", "source"]
