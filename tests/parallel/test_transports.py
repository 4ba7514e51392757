"""Every transport over two and three real gloo processes, against sums made here; local steps; configs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch

from distributed import run_distributed
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError, dump, parse
from modelwright.parallel.codecs.quantized import GROUP, MAX_CODE, Int8Codec
from modelwright.parallel.codecs.topk_quantized import TopKQuantizedConfig, bucket_bounds, decode_flat, encode_flat
from modelwright.parallel.gradient_sync import AllReduceSync, GradientSync, flatten
from modelwright.parallel.mesh import World, single
from modelwright.parallel.strategies.config import GradientSyncConfig, build_outer_step, build_sync
from parallel.transport_cases import CASES, ROUNDS, SHAPES, build, copied, gradients

pytestmark = pytest.mark.slow

ROUNDING = {"rtol": 1e-5, "atol": 2e-5}
WITH_FEEDBACK = ["bf16", "int8", "powersgd", "one_percent", "global", "warm", "all_kept"]
THREE_LEVEL = ["one_percent", "global", "warm", "momentum", "all_kept"]


def rounds(transport: GradientSync, rank: int, first: int, last: int) -> dict[str, torch.Tensor]:
    """Reduce; results, residuals and bytes of each round."""
    found = {}
    for round_ in range(first, last):
        parts = gradients(rank, round_)
        transport.reduce(parts)
        found |= {f"result/{round_}/{i}": part.clone() for i, part in enumerate(parts)}
        kept = transport.state_dict().get("residuals", [])
        found |= {f"residual/{round_}/{i}": part.clone() for i, part in enumerate(kept)}
        found[f"bytes/{round_}"] = torch.tensor(transport.bytes_sent)
    return found


def resumed(case: dict, world: World) -> dict[str, torch.Tensor]:
    """The second half of the rounds by a transport that was given the state of another one."""
    old, new = build(case, world), build(case, world)
    rounds(old, world.rank, 0, ROUNDS // 2)
    new.load_state_dict(copied(old.state_dict()))
    return rounds(new, world.rank, ROUNDS // 2, ROUNDS)


def after_a_nan(case: dict, world: World) -> dict[str, torch.Tensor]:
    """Rounds of which the third has one nan on the last rank; the others are as if it had not been."""
    transport = build(case, world)
    found = rounds(transport, world.rank, 0, 2)
    bad = gradients(world.rank, 50)
    if world.rank == world.size - 1:
        bad[0][3, 4] = torch.nan
    transport.reduce(bad)
    assert not all(bool(part.isfinite().all()) for part in bad), "all ranks must hear of the nan"
    return found | rounds(transport, world.rank, 2, ROUNDS)


class Walk:
    """Training without a model: weights that each rank moves by its own amounts, and a moment beside each."""

    def __init__(self, world: World, *, codec: dict | None = None, **local: object) -> None:
        draw = torch.Generator().manual_seed(7)
        self.weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
        self.moments = [torch.zeros(shape) for shape in SHAPES]
        case = {**(codec or {}), "local_sgd": {"sync_every_steps": 3, **local}}
        transport = build_outer_step(parse(GradientSyncConfig, case, constants=True), world)
        self.steps, self.rank = transport, world.rank

    def begin(self) -> None:
        self.steps.begin(self.weights, num_steps=8, private=lambda: {"moment": self.moments}, restore=self.restore)

    def restore(self, private: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for moment, value in zip(self.moments, private["moment"], strict=True):
            moment.copy_(value)

    def step_once(self, step: int) -> None:
        for weight, moment, part in zip(self.weights, self.moments, gradients(self.rank, step), strict=True):
            moment.mul_(0.9).add_(part)
            weight.sub_(moment, alpha=0.1)

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step_once(step)
            self.steps.after_update(self.weights, step + 1)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}/weight/{i}": weight.clone() for i, weight in enumerate(self.weights)}
        return found | {f"{name}/moment/{i}": moment.clone() for i, moment in enumerate(self.moments)}


def walks(world: World) -> dict[str, torch.Tensor]:
    found = {}
    sparse = {"codec": CASES["warm"], "keep_residual": True, "sync_every_steps": 2}
    for name, local in {
        "mean": {},
        "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.8},
        "keep_residual": sparse,
    }.items():
        whole = Walk(world, **local)
        whole.begin()
        for last in range(1, 9):
            whole.go(last - 1, last)
            found |= whole.tensors(f"{name}/{last}")
        found[f"{name}/bytes"] = torch.tensor(whole.steps.bytes_sent)
        half, again = Walk(world, **local), Walk(world, **local)
        half.begin()
        half.go(0, 5)
        state = copied(half.steps.state_dict())
        found |= {f"{name}/state/{i}": part for i, part in enumerate(state["weights"])}
        found |= {f"{name}/start/{i}": part for i, part in enumerate(state["shared"]["start"])}
        found |= {f"{name}/private/{i}": part for i, part in enumerate(state["private"]["moment"])}
        again.steps.load_state_dict(state)
        again.begin()
        again.go(5, 8)
        found |= again.tensors(f"{name}/again")
    return found


def every_case(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """Every case reduces the same gradients for some rounds; by case, what came out, what is kept and what was sent."""
    results = {}
    for name, case in CASES.items():
        results[name] = {
            **rounds(build(case, world), world.rank, 0, ROUNDS),
            **{f"resumed/{key}": value for key, value in resumed(case, world).items()},
            **{f"nan/{key}": value for key, value in after_a_nan(case, world).items()},
        }
    return {**results, "walks": walks(world)}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    """(number of ranks, case -> one dict of tensors a rank)."""
    results = run_distributed(every_case, request.param)
    return request.param, {name: [result[name] for result in results] for name in (*CASES, "walks")}


def listed(found, prefix):
    return [found[f"{prefix}/{i}"] for i in range(len(SHAPES))]


def sums(num_ranks, round_):
    """The exact sums over the ranks, in float64 of the same FP32 gradients."""
    parts = [gradients(rank, round_) for rank in range(num_ranks)]
    return [sum(share.double() for share in shares) for shares in zip(*parts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same_bits_on_all_ranks(ranks, case):
    _, found = ranks
    first, *others = found[case]
    for other in others:
        for name, value in first.items():
            if "result/" in name:
                assert torch.equal(value, other[name])


@pytest.mark.parametrize("case", ["exact", "all_kept"])
def test_with_nothing_left_out_the_result_is_the_sum(ranks, case):
    num_ranks, found = ranks
    for round_ in range(ROUNDS):
        for ours, exact in zip(listed(found[case][0], f"result/{round_}"), sums(num_ranks, round_), strict=True):
            # 16 bits: each share is off by at most half a level of its bucket, now and in the residual of before;
            # the largest magnitude of these gradients is below 100.
            atol = 1e-5 if case == "exact" else num_ranks * 100.0 / (2**15 - 1)
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", WITH_FEEDBACK)
def test_what_was_sent_and_what_is_kept_add_up_to_what_came_in(ranks, case):
    num_ranks, found = ranks
    came_in = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for round_ in range(ROUNDS):
        came_in = [old + new for old, new in zip(came_in, sums(num_ranks, round_), strict=True)]
        sent = [old + new for old, new in zip(sent, listed(found[case][0], f"result/{round_}"), strict=True)]
        kept = [sum(parts) for parts in zip(*(listed(one, f"residual/{round_}") for one in found[case]), strict=True)]
        assert max(float(part.abs().max()) for part in kept) > 0
        for total, out, left in zip(came_in, sent, kept, strict=True):
            torch.testing.assert_close(out + left.double(), total, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_state_gives_the_same_next_results(ranks, case):
    _, found = ranks
    for one in found[case]:
        for round_ in range(ROUNDS // 2, ROUNDS):
            for whole, resumed in zip(
                listed(one, f"result/{round_}"), listed(one, f"resumed/result/{round_}"), strict=True
            ):
                assert torch.equal(whole, resumed)


@pytest.mark.parametrize("case", CASES)
def test_a_nan_reaches_all_ranks_and_leaves_no_trace(ranks, case):
    _, found = ranks
    for one in found[case]:
        for round_ in range(ROUNDS):
            for calm, disturbed in zip(
                listed(one, f"result/{round_}"), listed(one, f"nan/result/{round_}"), strict=True
            ):
                assert torch.equal(calm, disturbed)


def test_bf16_rounds_twice_whatever_the_number_of_ranks(ranks):
    num_ranks, found = ranks
    rounded = [
        sum(part.bfloat16().double() for part in parts)
        for parts in zip(*(gradients(rank, 0) for rank in range(num_ranks)), strict=True)
    ]
    for ours, exact in zip(listed(found["bf16"][0], "result/0"), rounded, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)


def test_int8_rounds_twice_whatever_the_number_of_ranks(ranks):
    """To the nearest of 255 levels of each 1,024 values of each rank's chunk, and the sums again."""
    num_ranks, found = ranks
    shares = [flatten(gradients(rank, 0)).double() for rank in range(num_ranks)]
    chunk = -(-len(shares[0]) // num_ranks)
    rounded = [[in_levels(part) for part in share.split(chunk)] for share in shares]
    wanted = torch.cat([in_levels(sum(parts)) for parts in zip(*rounded, strict=True)])
    torch.testing.assert_close(flatten(listed(found["int8"][0], "result/0")).double(), wanted, rtol=1e-5, atol=1e-5)


def in_levels(values):
    groups = [values[first : first + GROUP] for first in range(0, len(values), GROUP)]
    return torch.cat([torch.round(one / one.abs().max() * MAX_CODE) * one.abs().max() / MAX_CODE for one in groups])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_keeps_what_is_not_finite_within_its_group(bad):
    values = torch.randn(2, 3 * GROUP + 5, generator=torch.Generator().manual_seed(0))
    values[1, GROUP + 7] = bad
    values[0, :GROUP] = 0.0
    values[0, GROUP : 2 * GROUP] *= 1e-38
    found = Int8Codec().decode(Int8Codec().encode(values), values.shape[1])
    assert not found[1, GROUP : 2 * GROUP].isfinite().any()
    found[1, GROUP : 2 * GROUP] = values[1, GROUP : 2 * GROUP] = 0.0
    step = values.abs().max() / MAX_CODE
    torch.testing.assert_close(found, values, rtol=1e-6, atol=float(step) / 2)
    assert torch.equal(found[0, :GROUP], values[0, :GROUP])


def power_sgd(num_ranks, rank):
    """Vogels et al., algorithm 1 and 2, in float64 and by the projector of P instead of its orthonormal frame."""
    chosen = [i for i, shape in enumerate(SHAPES) if shape in ((120, 70), (65, 80))]
    draw = torch.Generator().manual_seed(0)
    bases = {i: torch.randn(SHAPES[i][1], rank, generator=draw).double() for i in chosen}
    errors = {(r, i): torch.zeros(SHAPES[i], dtype=torch.float64) for r in range(num_ranks) for i in chosen}
    for round_ in range(ROUNDS):
        shares = [gradients(r, round_) for r in range(num_ranks)]
        result = sums(num_ranks, round_)
        for i in chosen:
            own = [shares[r][i].double() + errors[r, i] for r in range(num_ranks)]
            left = sum(own) @ bases[i]
            projector = left @ torch.linalg.pinv(left)
            for r in range(num_ranks):
                errors[r, i] = own[r] - projector @ own[r]
            result[i] = projector @ sum(own)
            bases[i] = sum(own).mT @ torch.linalg.qr(left)[0]
        yield result


def test_power_sgd_is_its_algorithm(ranks):
    num_ranks, found = ranks
    for round_, result in enumerate(power_sgd(num_ranks, rank=4)):
        for ours, naive in zip(listed(found["powersgd"][0], f"result/{round_}"), result, strict=True):
            torch.testing.assert_close(ours.double(), naive, rtol=1e-3, atol=1e-3)


def nearest_levels(values, bits):
    magnitudes = values.abs()
    low, high = float(magnitudes.min()), float(magnitudes.max())
    step = (high - low) / (2 ** (bits - 1) - 1) or 1.0
    return torch.sign(values) * (low + torch.round((magnitudes - low) / step) * step)


def deep_gradient_compression(num_ranks, *, keep, momentum):
    """Lin et al., algorithm 1 with momentum correction and factor masking: sums of the rounds, in float64 throughout.

    Buckets are this project's: (120, 70) with the small ones after it, then (65, 80) with (1,).
    """
    bounds = [0, 8400 + 37 + 1 + 60, 8400 + 37 + 1 + 60 + 5200 + 1]
    velocity = torch.zeros(num_ranks, bounds[-1], dtype=torch.float64)
    waiting = torch.zeros(num_ranks, bounds[-1], dtype=torch.float64)
    for round_ in range(ROUNDS):
        total = torch.zeros(bounds[-1], dtype=torch.float64)
        for rank in range(num_ranks):
            flat = torch.cat([part.flatten().double() for part in gradients(rank, round_)])
            velocity[rank] = momentum * velocity[rank] + flat
            waiting[rank] += velocity[rank] if momentum else flat
            for first, last in pairwise(bounds):
                part = waiting[rank, first:last]
                places = part.abs().argsort(descending=True)[: round(keep * len(part))] + first
                values = waiting[rank, places].clone()
                bits = 4
                while (nearest_levels(values, bits) - values).norm() > 0.1 * values.norm():
                    bits += 1
                total[places] += nearest_levels(values, bits)
                waiting[rank, places] -= nearest_levels(values, bits)
                velocity[rank, places] = 0.0
        yield total


@pytest.mark.parametrize(("case", "keep", "momentum"), [("one_percent", 0.01, 0.0), ("momentum", 0.1, 0.9)])
def test_three_levels_are_their_definition(ranks, case, keep, momentum):
    num_ranks, found = ranks
    for round_, total in enumerate(deep_gradient_compression(num_ranks, keep=keep, momentum=momentum)):
        ours = torch.cat([part.flatten() for part in listed(found[case][0], f"result/{round_}")])
        torch.testing.assert_close(ours.double(), total, rtol=1e-4, atol=1e-3)


def test_bytes_are_those_of_the_wire(ranks):
    num_ranks, found = ranks
    numel = sum(part.numel() for part in gradients(0, 0))
    padded = -(-numel // num_ranks)
    sent = {case: int(found[case][0][f"bytes/{ROUNDS - 1}"]) / ROUNDS for case in CASES}
    assert sent["exact"] == pytest.approx(2 * 4 * numel * (num_ranks - 1) / num_ranks, abs=1)
    assert sent["bf16"] == 2 * 2 * padded * (num_ranks - 1)
    assert sent["int8"] == 2 * (padded + 4 * -(-padded // GROUP)) * (num_ranks - 1)
    factors = 4 * (4 * (120 + 70 + 65 + 80) + 37 + 1 + 60 + 1)
    assert sent["powersgd"] == pytest.approx(2 * factors * (num_ranks - 1) / num_ranks, abs=3)


def three_level_config(case):
    return parse(GradientSyncConfig, CASES[case], constants=True).topk_quantized


@pytest.mark.parametrize("case", THREE_LEVEL)
def test_first_message_is_counted_to_the_byte(ranks, case):
    num_ranks, found = ranks
    config = three_level_config(case)
    bounds = bucket_bounds([part.numel() for part in gradients(0, 0)], config.bucket_numel)
    messages = [encode_flat(flatten(gradients(rank, 0)), bounds, config, config.share(0)) for rank in range(num_ranks)]
    # Two ranks swap messages, more pad them to the longest.
    longest = max(map(len, messages[: num_ranks if num_ranks > 2 else 1]))
    assert int(found[case][0]["bytes/0"]) == (num_ranks - 1) * (8 + longest)
    for message in messages:
        assert len(decode_flat(message, bounds).values_K) == pytest.approx(config.share(0) * bounds[-1], rel=0.1)


def test_one_percent_removes_more_than_98_percent_of_the_bytes(ranks):
    num_ranks, found = ranks
    sent = {case: int(found[case][0][f"bytes/{ROUNDS - 1}"]) for case in ("exact", "one_percent")}
    assert sent["one_percent"] < (0.01 if num_ranks == 2 else 0.015) * sent["exact"]


def test_the_warm_up_sends_ever_fewer(ranks):
    _, found = ranks
    totals = [int(found["warm"][0][f"bytes/{round_}"]) for round_ in range(ROUNDS)]
    each = [last - first for first, last in pairwise([0, *totals])]
    assert each[0] > 1.5 * each[1] > 2 * each[2]
    assert each[4] == pytest.approx(each[5], rel=0.1)
    shares = [three_level_config("warm").share(message) for message in range(6)]
    assert shares[0] == 0.5
    assert shares[2] == pytest.approx((0.5 * 0.01) ** 0.5)
    assert shares[4] == shares[5] == 0.01


def walk_by_hand(num_ranks, *, outer_lr=1.0, outer_momentum=0.0):
    """DiLoCo (algorithm 1) in float64: weights of every rank after each of 8 steps, meetings after 3 and 6; at the end
    the plain mean."""
    draw = torch.Generator().manual_seed(7)
    start = flatten([torch.randn(shape, generator=draw) for shape in SHAPES]).double()
    weights = [start.clone() for _ in range(num_ranks)]
    moments = [torch.zeros_like(start) for _ in range(num_ranks)]
    outer = torch.zeros_like(start)
    for step in range(8):
        for rank in range(num_ranks):
            moments[rank] = 0.9 * moments[rank] + flatten(gradients(rank, step)).double()
            weights[rank] = weights[rank] - 0.1 * moments[rank]
        if step + 1 in (3, 6, 8):
            mean = sum(start - weight for weight in weights) / num_ranks
            outer = outer_momentum * outer + mean
            start = start - (outer_lr * (mean + outer_momentum * outer) if step < 7 else mean)
            weights = [start.clone() for _ in range(num_ranks)]
        yield weights


@pytest.mark.parametrize(("case", "outer"), [("mean", {}), ("nesterov", {"outer_lr": 0.7, "outer_momentum": 0.8})])
def test_local_steps_are_diloco(ranks, case, outer):
    num_ranks, found = ranks
    for step, weights in enumerate(walk_by_hand(num_ranks, **outer)):
        for rank, one in enumerate(found["walks"]):
            ours = flatten(listed(one, f"{case}/{step + 1}/weight"))
            torch.testing.assert_close(ours.double(), weights[rank], **ROUNDING)
    numel = sum(part.numel() for part in gradients(0, 0))
    per_meeting = 2 * 4 * numel * (num_ranks - 1) // num_ranks
    assert int(found["walks"][0][f"{case}/bytes"]) == pytest.approx(3 * per_meeting, abs=3)


@pytest.mark.parametrize("case", ["mean", "nesterov", "keep_residual"])
def test_local_steps_go_on_between_meetings_with_the_same_bits(ranks, case):
    _, found = ranks
    for one in found["walks"]:
        for part in ("weight", "moment"):
            for whole, again in zip(listed(one, f"{case}/8/{part}"), listed(one, f"{case}/again/{part}"), strict=True):
                assert torch.equal(whole, again)


def test_local_steps_of_several_ranks_go_on_alone_from_their_mean(ranks):
    num_ranks, found = ranks
    state = {
        "shared": {"start": listed(found["walks"][0], "mean/start"), "momentum": [], "num_ranks": num_ranks},
        "transport": {},
    }
    ours = [listed(one, "mean/state") for one in found["walks"]]
    moments = [listed(one, "mean/private") for one in found["walks"]]
    # One new rank gets the sum over the old ones, divided by one.
    state["weights"] = [sum(parts) for parts in zip(*ours, strict=True)]
    state["private"] = {"moment": [sum(parts) for parts in zip(*moments, strict=True)]}
    alone = Walk(single())
    alone.steps.load_state_dict(state)
    alone.begin()
    for new, old in ((alone.weights, ours), (alone.moments, moments)):
        mean = [sum(parts) / num_ranks for parts in zip(*old, strict=True)]
        torch.testing.assert_close(flatten(new), flatten(mean), **ROUNDING)
    alone.go(5, 6)
    torch.testing.assert_close(flatten(alone.weights), flatten(alone.steps.start), rtol=0, atol=0)


def test_what_the_codec_did_not_send_stays_in_the_own_weights_and_the_mean_of_the_weights_is_kept(ranks):
    """Sparse synchronizations with `keep_residual` move weights between ranks but never their mean, and end where they
    all agree."""
    num_ranks, found = ranks
    for step in range(8):
        ours = [flatten(listed(one, f"keep_residual/{step + 1}/weight")) for one in found["walks"]]
        plain = list(walk_without_meetings(num_ranks))[step]
        torch.testing.assert_close(sum(ours).double() / num_ranks, plain, rtol=1e-4, atol=1e-4)
        agreed = float((ours[0] == ours[1]).float().mean())
        assert agreed == 1.0 if step == 7 else agreed < 0.5
    starts = [flatten(listed(one, "keep_residual/start")) for one in found["walks"]]
    assert all(torch.equal(starts[0], start) for start in starts)


def walk_without_meetings(num_ranks):
    """The mean of the ranks' weights after each step; the steps of `Walk` do not depend on where it is."""
    alone = [Walk(single()) for _ in range(num_ranks)]
    for step in range(8):
        for rank, walk in enumerate(alone):
            walk.rank = rank
            walk.step_once(step)
        yield sum(flatten(walk.weights).double() for walk in alone) / num_ranks


@pytest.mark.parametrize("case", ["bf16", "powersgd", "one_percent"])
def test_residuals_of_a_larger_world_join_the_gradients_of_a_rank_alone(case):
    transport = build(CASES[case], single())
    state = transport.state_dict()
    parts, left = gradients(0, 0), gradients(5, 5)
    expected = [part + rest for part, rest in zip(parts, left, strict=True)]
    transport.load_state_dict({**state, "residuals": left})
    transport.reduce(parts)
    torch.testing.assert_close(parts, expected)
    again = gradients(0, 1)
    transport.reduce(again)
    torch.testing.assert_close(again, gradients(0, 1), rtol=0, atol=0)


def test_residuals_of_other_parameters_are_refused():
    transport = build(CASES["bf16"], single())
    transport.load_state_dict({"residuals": [torch.ones(3)]})
    with pytest.raises(ArtifactError, match="belong to other parameters"):
        transport.reduce([torch.ones(4)])


def test_buckets_cover_everything_and_small_tensors_join_their_neighbor():
    assert bucket_bounds([10, 20, 5000, 64, 64, 9000, 1], 4500) == [0, 10 + 20, 2530, 5158, 9658, 14159]
    assert bucket_bounds([3], 256) == [0, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "top_k"}, "kind"),
        ({"powersgd_rank": 0}, "powersgd_rank"),
        ({"topk_quantized": {"topk_fraction": 0.0}}, "topk_quantized.topk_fraction"),
        ({"topk_quantized": {"topk_fraction": 1.5}}, "topk_quantized.topk_fraction"),
        ({"topk_quantized": {"min_bits": 1}}, "topk_quantized.min_bits"),
        ({"topk_quantized": {"min_bits": 9, "max_bits": 8}}, "topk_quantized.min_bits"),
        ({"topk_quantized": {"bucket_numel": 1}}, "topk_quantized.bucket_numel"),
        ({"topk_quantized": {"max_error": 0.0}}, "topk_quantized.max_error"),
        ({"topk_quantized": {"momentum": 1.0}}, "topk_quantized.momentum"),
        ({"topk_quantized": {"warmup_messages": -1}}, "topk_quantized.warmup_messages"),
        ({"local_sgd": {"sync_every_steps": -1}}, "local_sgd.sync_every_steps"),
        ({"local_sgd": {"outer_lr": 0.0}}, "local_sgd.outer_lr"),
        ({"local_sgd": {"outer_momentum": 1.0}}, "local_sgd.outer_momentum"),
    ],
)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ConfigError, match=f"^{message}:"):
        parse(GradientSyncConfig, change, constants=True)


def test_config_is_plain_data_and_back():
    config = GradientSyncConfig(kind="topk_quantized", topk_quantized=TopKQuantizedConfig(topk_fraction=0.1))
    assert parse(GradientSyncConfig, dump(config)) == config
    assert isinstance(build_sync(GradientSyncConfig(), single()).sync, AllReduceSync)
