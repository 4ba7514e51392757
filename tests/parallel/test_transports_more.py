"""Values by levels and their means, shared second moments, and the recipe of both, against sums made here."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from distributed import run_distributed
from modelwright.core.config import ConfigError, parse
from modelwright.ops import sparse_codec
from modelwright.ops.sparse_codec import MAX_LEVELS, decode_levels, decode_moves, encode_levels, encode_moves
from modelwright.parallel.codecs.topk_quantized import TopKQuantizedConfig, decode_flat, encode_flat
from modelwright.parallel.gradient_sync import flatten
from modelwright.parallel.mesh import World, single
from modelwright.parallel.strategies.config import GradientSyncConfig, build_outer_step
from modelwright.parallel.strategies.local_sgd import FLOOR, SharedMoment, decode_matrices, encode_matrices
from parallel.transport_cases import copied

SHAPES = ((120, 70), (37,), (4, 3, 5))
ROUNDS = 4
OCTAVES = 0.5
NUM_STEPS = 9
RECIPE = {
    "kind": "topk_quantized",
    "topk_quantized": {"topk_fraction": 0.3, "selection": "global", "codebook": "means"},
    "local_sgd": {
        "sync_every_steps": 2,
        "keep_residual": True,
        "sync_second_moment_every": 2,
        "moment_octaves": OCTAVES,
    },
}


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
    message = encode_levels(places, values[places], [0, len(values)])
    indices, found = decode_levels(np.concatenate([message, message]), [0, len(values), 2 * len(values)])
    np.testing.assert_array_equal(indices, [*places, *places + len(values)])
    np.testing.assert_allclose(found, np.tile(level_means(values[places]), 2), rtol=1e-5)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [0.0, 3.0], [-2.0], [1.0, -1e9]])
def test_levels_of_few_values(values):
    values = np.array(values, np.float32)
    message = encode_levels(np.arange(len(values)), values, [0, 7])
    indices, found = decode_levels(message, [0, 7])
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
    bits = 8 * len(encode_levels(places, values[places], [0, len(values)])) / len(values)
    assert entropy < bits < 1.03 * entropy


def left(values, config):
    """(bits an entry, share of the energy that a message leaves behind)."""
    message = encode_flat(values, [0, len(values)], config, config.topk_fraction)
    sparse = decode_flat(message, [0, len(values)], config.codebook)
    rest = values.clone()
    rest[torch.from_numpy(sparse.indices_K)] -= torch.from_numpy(sparse.values_K)
    return 8 * len(message) / len(values), float(rest.square().sum() / values.square().sum())


def test_means_leave_less_behind_than_even_levels_for_fewer_bytes():
    values = torch.from_numpy(gaussian(100_000))
    bits_even, left_even = left(values, TopKQuantizedConfig(topk_fraction=0.25, selection="global", max_error=0.5))
    bits_means, left_means = left(values, TopKQuantizedConfig(topk_fraction=0.35, selection="global", codebook="means"))
    assert bits_means < 0.9 * bits_even
    assert left_means < 0.9 * left_even


@pytest.mark.parametrize("spread", [0, 1, 40])
def test_moves_come_back(spread):
    draw = torch.Generator().manual_seed(spread)
    moves = torch.randint(-spread - 60, spread - 59, (1001,), generator=draw).float().numpy()
    np.testing.assert_array_equal(decode_moves(encode_moves(moves), 1001), moves)


@pytest.mark.parametrize("shapes", [SHAPES, [()], [(1,), (0,), (3, 0)], [(1, 9), (9, 1), (5, 4)]])
def test_moves_of_matrices_come_back(shapes):
    draw = torch.Generator().manual_seed(3)
    moves = [torch.randint(-40, 9, shape, generator=draw).float() for shape in shapes]
    assert torch.equal(decode_matrices(encode_matrices(moves), moves), flatten(moves))


def test_moves_that_rows_and_columns_explain_cost_little():
    rows, columns = torch.arange(-30.0, 31.0)[:, None], torch.arange(0.0, 243.0, 3.0)
    alone = encode_moves((rows + columns).flatten().numpy())
    assert len(encode_matrices([rows + columns])) < len(alone) / 20


def moments(rank: int, round_: int) -> list[torch.Tensor]:
    """Squares over many magnitudes, some exactly zero; ranks and rounds are alike but not equal."""
    common, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(1000 + 10 * rank + round_)
    found = []
    for shape in SHAPES:
        size = torch.exp2(torch.randn(shape, generator=common) * 8 - 20)
        found.append(size * torch.rand(shape, generator=own) * (torch.rand(shape, generator=common) > 0.1))
    return found


def shared(world: World) -> dict[str, torch.Tensor]:
    ours, found = SharedMoment(world, octaves=OCTAVES), {}
    for round_ in range(ROUNDS):
        parts = moments(world.rank, round_)
        ours.share(parts)
        found |= {f"{round_}/moment/{i}": part for i, part in enumerate(parts)}
        found |= {f"{round_}/agreed/{i}": part.clone() for i, part in enumerate(ours.agreed)}
        found[f"{round_}/bytes"] = torch.tensor(ours.bytes_sent)
    bad = moments(world.rank, ROUNDS)
    if world.rank == world.size - 1:
        bad[1][3] = torch.inf
    ours.share(bad)
    return found | {f"bad/{i}": part for i, part in enumerate(bad)}


class Adam:
    """Weights that each rank moves by gradients of its own, as Adam does, through the recipe's local steps."""

    def __init__(self, world: World) -> None:
        draw = torch.Generator().manual_seed(7)
        self.weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
        self.moments = {name: [torch.zeros(shape) for shape in SHAPES] for name in ("exp_avg", "exp_avg_sq")}
        self.steps, self.rank = build_outer_step(parse(GradientSyncConfig, RECIPE, constants=True), world), world.rank

    def begin(self) -> None:
        self.steps.begin(self.weights, num_steps=NUM_STEPS, private=lambda: self.moments, restore=self.restore)

    def restore(self, private: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for name, values in private.items():
            for moment, value in zip(self.moments[name], values, strict=True):
                moment.copy_(value)

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(100 * self.rank + step)
            for weight, mean, square in zip(self.weights, *self.moments.values(), strict=True):
                gradient = torch.randn(weight.shape, generator=draw) ** 3
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.05)
                weight.sub_(0.1 * mean / (square.sqrt() + 1e-8))
            self.steps.after_update(self.weights, step + 1)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}/weight/{i}": weight.clone() for i, weight in enumerate(self.weights)}
        return found | {f"{name}/square/{i}": part.clone() for i, part in enumerate(self.moments["exp_avg_sq"])}


def recipe(world: World) -> dict[str, torch.Tensor]:
    """The whole way, and the same with a checkpoint after step 5, between two meetings and after one sharing."""
    whole, found = Adam(world), {}
    whole.begin()
    for last in range(1, NUM_STEPS + 1):
        whole.go(last - 1, last)
        found |= whole.tensors(str(last))
    half, again = Adam(world), Adam(world)
    half.begin()
    half.go(0, 5)
    again.steps.load_state_dict(copied(half.steps.state_dict()))
    again.begin()
    again.go(5, NUM_STEPS)
    return found | again.tensors("again") | {"bytes": torch.tensor(whole.steps.bytes_sent)}


def shared_and_recipe(world: World) -> dict[str, dict[str, torch.Tensor]]:
    return {"shared": shared(world), "recipe": recipe(world)}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    """(number of ranks, case -> one dict of tensors a rank)."""
    results = run_distributed(shared_and_recipe, request.param)
    return request.param, {name: [result[name] for result in results] for name in ("shared", "recipe")}


def flat(found, prefix):
    return flatten([found[f"{prefix}/{i}"] for i in range(len(SHAPES))]).double()


def share_by_hand(own, agreed):
    """Moments of all ranks after a sharing, and what all then know: float64, no bytes."""
    own = [values.clamp(min=FLOOR) for values in own]
    known = [2 ** (agreed + OCTAVES * torch.round((values.log2() - agreed) / OCTAVES)) for values in own]
    total = torch.stack(known).sum(dim=0)
    return [(total - told + true) / len(own) for told, true in zip(known, own, strict=True)], (total / len(own)).log2()


def test_shared_moments_are_the_mean_to_half_a_step_and_known_alike(ranks):
    num_ranks, found = ranks
    agreed = torch.zeros(sum(math.prod(shape) for shape in SHAPES), dtype=torch.float64)
    for round_ in range(ROUNDS):
        own = [flatten(moments(rank, round_)).double() for rank in range(num_ranks)]
        expected, agreed = share_by_hand(own, agreed)
        mean = sum(values.clamp(min=FLOOR) for values in own) / num_ranks
        for rank, one in enumerate(found["shared"]):
            ours = flat(one, f"{round_}/moment")
            # A move that lies halfway between two whole numbers may be rounded either way.
            alike = torch.isclose(ours, expected[rank], rtol=1e-4, atol=0)
            assert float(alike.double().mean()) > 0.999
            assert float((ours / mean).log2().abs().max()) <= OCTAVES / 2 + 1e-4
            assert torch.equal(flat(one, f"{round_}/agreed"), flat(found["shared"][0], f"{round_}/agreed"))
        agreed = flat(found["shared"][0], f"{round_}/agreed")


def test_later_messages_say_only_what_moved(ranks):
    num_ranks, found = ranks
    numel = sum(math.prod(shape) for shape in SHAPES)
    totals = [int(found["shared"][0][f"{round_}/bytes"]) for round_ in range(ROUNDS)]
    first, later = totals[0], (totals[-1] - totals[0]) / (ROUNDS - 1)
    assert later < 0.7 * first
    assert later < (num_ranks - 1) * numel * 4 / 8
    messages = [
        encode_matrices([(part.clamp(min=FLOOR).log2() / OCTAVES).round() for part in moments(rank, 0)])
        for rank in range(num_ranks)
    ]
    # Two ranks swap messages, more pad them to the longest.
    longest = max(map(len, messages[: num_ranks if num_ranks > 2 else 1]))
    assert first == (num_ranks - 1) * (8 + longest)


def test_moments_that_are_not_finite_change_nothing(ranks):
    num_ranks, found = ranks
    for rank in range(num_ranks - 1):
        assert torch.equal(flat(found["shared"][rank], "bad"), flatten(moments(rank, ROUNDS)).double())


def test_a_rank_alone_keeps_its_moments():
    parts = moments(0, 0)
    SharedMoment(single()).share(parts)
    torch.testing.assert_close(parts, moments(0, 0), rtol=0, atol=0)


def recipe_by_hand(num_ranks):
    """Local Adam of every rank in float64, meetings after 2, 4, 6 and 8 of 9 steps, moments shared after 4 and 8."""
    config = TopKQuantizedConfig(topk_fraction=0.3)
    numel = sum(math.prod(shape) for shape in SHAPES)
    draw = torch.Generator().manual_seed(7)
    start = flatten([torch.randn(shape, generator=draw) for shape in SHAPES]).double()
    weights, agreed = [start.clone() for _ in range(num_ranks)], torch.zeros(numel, dtype=torch.float64)
    means, squares, unsent = ([torch.zeros_like(start) for _ in range(num_ranks)] for _ in range(3))
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            draw = torch.Generator().manual_seed(100 * rank + step)
            gradient = flatten([torch.randn(shape, generator=draw) ** 3 for shape in SHAPES]).double()
            means[rank] = 0.9 * means[rank] + 0.1 * gradient
            squares[rank] = 0.95 * squares[rank] + 0.05 * gradient**2
            weights[rank] = weights[rank] - 0.1 * means[rank] / (squares[rank].sqrt() + 1e-8)
        if step + 1 == NUM_STEPS:
            weights = [sum(weights) / num_ranks] * num_ranks
        elif step % 2:
            total = torch.zeros_like(start)
            for rank in range(num_ranks):
                waiting = (start - weights[rank]) / num_ranks  # what was kept is in the weights already
                places = torch.from_numpy(largest(waiting.numpy(), config.topk_fraction))
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
            assert torch.equal(flat(one, f"{NUM_STEPS}/{name}"), flat(one, f"again/{name}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_quantized": {"codebook": "odd"}}, "topk_quantized.codebook"),
        ({"local_sgd": {"sync_second_moment_every": -1}}, "local_sgd.sync_second_moment_every"),
        ({"local_sgd": {"moment_octaves": 0.0}}, "local_sgd.moment_octaves"),
    ],
)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ConfigError, match=f"^{message}:"):
        parse(GradientSyncConfig, change, constants=True)


def test_even_and_mean_levels_share_one_place_code():
    values = gaussian(1000)
    places = largest(values, 0.1)
    kind, data = sparse_codec.encode_places(places, 1000)
    assert data.tobytes() in encode_levels(places, values[places], [0, 1000]).tobytes()
    assert kind < 254
