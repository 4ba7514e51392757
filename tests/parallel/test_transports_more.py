"""Values by levels and their means, shared second moments, and the recipe of both, against sums made here."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modelwright.core.config import parse
from modelwright.core.errors import ConfigError
from modelwright.ops import sparse_code
from modelwright.parallel.codecs.codebook import MAX_LEVELS, decode_levels, encode_levels
from modelwright.parallel.codecs.error_feedback import flatten
from modelwright.parallel.codecs.topk_quantized import ThreeLevelConfig, decode_flat, encode_flat
from modelwright.parallel.mesh import single
from modelwright.parallel.strategies.config import TransportConfig
from modelwright.parallel.strategies.second_moment_sync import FLOOR, SharedMoment, decode_moves, encode_moves
from parallel import moment_ranks as job
from rank_processes import run_ranks


def gaussian(numel, seed=0):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def largest(values, keep):
    return np.sort(np.argsort(-np.abs(values), kind="stable")[: round(keep * len(values))])


def level_means(values):
    """Each value by its sign and the mean of all magnitudes between the same two multiples of the smallest one."""
    magnitudes = np.abs(values).astype(np.float64)
    lowest = magnitudes.min()
    found = np.zeros(len(values))
    for level in range(1, MAX_LEVELS + 1):
        inside = magnitudes / lowest >= level
        inside &= (magnitudes / lowest < level + 1) | (level == MAX_LEVELS)
        if inside.any():
            found[inside] = magnitudes[inside].mean()
    return np.sign(values) * found


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.35, 0.8, 1.0])
def test_levels_are_their_definition_and_end_where_they_say(keep):
    values = gaussian(4001) ** 3
    places = largest(values, keep)
    message = encode_levels(places, values[places], len(values))
    indices, found, used = decode_levels(np.concatenate([message, message]), len(values))
    assert used == len(message)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_allclose(found, level_means(values[places]), rtol=1e-5)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [0.0, 3.0], [-2.0], [1.0, -1e9]])
def test_levels_of_few_values(values):
    values = np.array(values, np.float32)
    message = encode_levels(np.arange(len(values)), values, 7)
    indices, found, used = decode_levels(message, 7)
    assert used == len(message)
    np.testing.assert_array_equal(indices, np.arange(len(values)))
    assert len(found) == len(values)
    if 0.0 not in values:
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("keep", [0.05, 0.1, 0.2, 0.35])
def test_levels_cost_little_more_than_their_entropy(keep):
    values = gaussian(100_000)
    places = largest(values, keep)
    levels = np.minimum(np.abs(values[places]) / np.abs(values[places]).min(), MAX_LEVELS).astype(int)
    shares = np.bincount(levels) / len(values)
    shares = np.append(shares[shares > 0], 1 - keep)
    entropy = -(shares * np.log2(shares)).sum() + keep
    bits = 8 * len(encode_levels(places, values[places], len(values))) / len(values)
    assert entropy < bits < 1.03 * entropy


def left(values, config):
    """(bits an entry, share of the energy that a message leaves behind)."""
    message = encode_flat(values, [0, len(values)], config, config.keep)
    sparse = decode_flat(message, [0, len(values)], config.values)
    rest = values.clone()
    rest[torch.from_numpy(sparse.indices_K)] -= torch.from_numpy(sparse.values_K)
    return 8 * len(message) / len(values), float(rest.square().sum() / values.square().sum())


def test_means_leave_less_behind_than_even_levels_for_fewer_bytes():
    values = torch.from_numpy(gaussian(100_000))
    bits_even, left_even = left(values, ThreeLevelConfig(keep=0.25, selection="global", max_error=0.5))
    bits_means, left_means = left(values, ThreeLevelConfig(keep=0.35, selection="global", values="means"))
    assert bits_means < 0.9 * bits_even
    assert left_means < 0.9 * left_even


@pytest.mark.parametrize("spread", [0, 1, 40])
def test_moves_come_back(spread):
    draw = torch.Generator().manual_seed(spread)
    moves = torch.randint(-spread - 60, spread - 59, (1001,), generator=draw).float()
    assert torch.equal(decode_moves(encode_moves(moves), 1001), moves)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """(number of ranks, what they wrote: case -> one dict of tensors a rank)."""
    folder = tmp_path_factory.mktemp(f"moments-{request.param}")
    run_ranks(Path(job.__file__), folder, size=request.param)
    return request.param, {
        name: [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(request.param)]
        for name in ("shared", "recipe")
    }


def flat(found, prefix):
    return flatten([found[f"{prefix}/{i}"] for i in range(len(job.SHAPES))]).double()


def share_by_hand(own, agreed):
    """Moments of all ranks after a sharing, and what all then know: float64, no bytes."""
    own = [values.clamp(min=FLOOR) for values in own]
    known = [2 ** (agreed + job.OCTAVES * torch.round((values.log2() - agreed) / job.OCTAVES)) for values in own]
    total = torch.stack(known).sum(dim=0)
    return [(total - told + true) / len(own) for told, true in zip(known, own, strict=True)], (total / len(own)).log2()


def test_shared_moments_are_the_mean_to_half_a_step_and_known_alike(ranks):
    num_ranks, found = ranks
    agreed = torch.zeros(sum(math.prod(shape) for shape in job.SHAPES), dtype=torch.float64)
    for round_ in range(job.ROUNDS):
        own = [flatten(job.moments(rank, round_)).double() for rank in range(num_ranks)]
        expected, agreed = share_by_hand(own, agreed)
        mean = sum(values.clamp(min=FLOOR) for values in own) / num_ranks
        for rank, one in enumerate(found["shared"]):
            ours = flat(one, f"{round_}/moment")
            # A move that lies halfway between two whole numbers may be rounded either way.
            alike = torch.isclose(ours, expected[rank], rtol=1e-4, atol=0)
            assert float(alike.double().mean()) > 0.999
            assert float((ours / mean).log2().abs().max()) <= job.OCTAVES / 2 + 1e-4
            assert torch.equal(flat(one, f"{round_}/agreed"), flat(found["shared"][0], f"{round_}/agreed"))
        agreed = flat(found["shared"][0], f"{round_}/agreed")


def test_later_messages_say_only_what_moved(ranks):
    num_ranks, found = ranks
    numel = sum(math.prod(shape) for shape in job.SHAPES)
    totals = [int(found["shared"][0][f"{round_}/bytes"]) for round_ in range(job.ROUNDS)]
    first, later = totals[0], (totals[-1] - totals[0]) / (job.ROUNDS - 1)
    assert later < 0.7 * first
    assert later < (num_ranks - 1) * numel * 4 / 8
    agreed = torch.zeros(numel)
    messages = [
        encode_moves(((flatten(job.moments(rank, 0)).clamp(min=FLOOR).log2() - agreed) / job.OCTAVES).round())
        for rank in range(num_ranks)
    ]
    assert first == (num_ranks - 1) * (8 + max(map(len, messages)))


def test_moments_that_are_not_finite_change_nothing(ranks):
    num_ranks, found = ranks
    for rank in range(num_ranks - 1):
        assert torch.equal(flat(found["shared"][rank], "bad"), flatten(job.moments(rank, job.ROUNDS)).double())


def test_a_rank_alone_keeps_its_moments():
    parts = job.moments(0, 0)
    SharedMoment(single()).share(parts)
    torch.testing.assert_close(parts, job.moments(0, 0), rtol=0, atol=0)


def recipe_by_hand(num_ranks):
    """Local Adam of every rank in float64, meetings after 2, 4, 6 and 8 of 9 steps, moments shared after 4 and 8."""
    config = ThreeLevelConfig(keep=0.3)
    numel = sum(math.prod(shape) for shape in job.SHAPES)
    draw = torch.Generator().manual_seed(7)
    start = flatten([torch.randn(shape, generator=draw) for shape in job.SHAPES]).double()
    weights, agreed = [start.clone() for _ in range(num_ranks)], torch.zeros(numel, dtype=torch.float64)
    means, squares, unsent = ([torch.zeros_like(start) for _ in range(num_ranks)] for _ in range(3))
    for step in range(job.NUM_STEPS):
        for rank in range(num_ranks):
            draw = torch.Generator().manual_seed(100 * rank + step)
            gradient = flatten([torch.randn(shape, generator=draw) ** 3 for shape in job.SHAPES]).double()
            means[rank] = 0.9 * means[rank] + 0.1 * gradient
            squares[rank] = 0.95 * squares[rank] + 0.05 * gradient**2
            weights[rank] = weights[rank] - 0.1 * means[rank] / (squares[rank].sqrt() + 1e-8)
        if step + 1 == job.NUM_STEPS:
            weights = [sum(weights) / num_ranks] * num_ranks
        elif step % 2:
            total = torch.zeros_like(start)
            for rank in range(num_ranks):
                waiting = (start - weights[rank]) / num_ranks  # what was kept is in the weights already
                places = torch.from_numpy(largest(waiting.numpy(), config.keep))
                sent = torch.zeros_like(start)
                sent[places] = torch.from_numpy(level_means(waiting[places].numpy()))
                unsent[rank] = waiting - sent
                total += sent
            start = start - total
            weights = [start - num_ranks * rest for rest in unsent]
            if step in (3, 7):
                squares, agreed = share_by_hand(squares, agreed)
        yield weights, squares


def test_the_recipe_is_local_adam_with_sparse_meetings_and_shared_moments(ranks):
    num_ranks, found = ranks
    for step, (weights, squares) in enumerate(recipe_by_hand(num_ranks)):
        for rank, one in enumerate(found["recipe"]):
            for name, expected in (("weight", weights), ("square", squares)):
                ours = flat(one, f"{step + 1}/{name}")
                # FP32 and float64 may choose, round or class a value at a limit otherwise; never many.
                alike = torch.isclose(ours, expected[rank], rtol=1e-3, atol=1e-3)
                assert float(alike.double().mean()) > 0.99, (step, rank, name)
    assert torch.equal(flat(found["recipe"][0], "9/weight"), flat(found["recipe"][1], "9/weight"))


def test_the_recipe_goes_on_from_a_checkpoint_with_the_same_bits(ranks):
    _, found = ranks
    for one in found["recipe"]:
        for name in ("weight", "square"):
            assert torch.equal(flat(one, f"{job.NUM_STEPS}/{name}"), flat(one, f"again/{name}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"three_level": {"values": "odd"}}, "three_level.values"),
        ({"local_steps": {"moment_every": -1}}, "local_steps.moment_every"),
        ({"local_steps": {"moment_octaves": 0.0}}, "local_steps.moment_octaves"),
    ],
)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ConfigError, match=f"^{message}:"):
        parse(TransportConfig, change)


def test_even_and_mean_levels_share_one_place_code():
    values = gaussian(1000)
    places = largest(values, 0.1)
    kind, data = sparse_code.encode_places(places, 1000)
    assert data.tobytes() in encode_levels(places, values[places], 1000).tobytes()
    assert kind < 254
