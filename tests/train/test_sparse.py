"""Sparse updates through THE loop, one process: what is left out is left out everywhere, and nothing else changes."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from modelwright.core.config import ConfigError, Stopped
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED
from modelwright.objectives.next_token import NextToken
from modelwright.ops.matmul import Executed
from modelwright.train.job import all_reduce_by
from modelwright.train.objective import forward
from modelwright.train.techniques.batch_selection import (
    BatchSelectionConfig,
    BatchSelector,
    first_tokens,
)
from modelwright.train.work import attention_flops, dense_flops, head_flops
from refusals import config_error

QUIET = {"eval_every_steps": 0, "checkpoint_every_steps": 0}
FORMS: dict[str, dict[str, Any]] = {
    "columns": {"sparse_updates": {"kind": "columns", "keep_fraction": 0.5, "refresh_every_steps": 2}},
    "rows": {"sparse_updates": {"kind": "rows", "keep_fraction": 0.5, "refresh_every_steps": 3, "signal": "momentum"}},
    "layers": {"sparse_updates": {"kind": "layers", "keep_fraction": 0.5, "refresh_every_steps": 2}},
    "freeze_prefix": {
        "sparse_updates": {
            "kind": "freeze_prefix",
            "keep_fraction": 0.5,
            "density_schedule": "dense_first",
            "ramp_fraction": 0.5,
        }
    },
    "loss": {"batch_selection": {"signal": "loss", "keep_fraction": 0.5, "probe_tokens": 8}},
    "change": {
        "batch_selection": {"signal": "loss_change", "keep_fraction": 0.5, "probe_tokens": 8, "dense_fraction": 0.2}
    },
    "limited": {
        "batch_selection": {"signal": "loss_change", "keep_fraction": 0.5, "probe_tokens": 8, "max_initial_loss": 0.99}
    },
    "random": {"batch_selection": {"signal": "random", "keep_fraction": 0.5}},
    "both": {
        "sparse_updates": {"kind": "layers", "keep_fraction": 0.5},
        "batch_selection": {"signal": "loss", "keep_fraction": 0.5, "probe_tokens": 8},
    },
}


class Spy:
    """Keeps what every step was, and can stop the run."""

    every = 1

    def __init__(self, stop_at: int = 0) -> None:
        self.seen, self.stop_at = [], stop_at

    def observe(self, info):
        self.seen.append(info)
        if info.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Grads:
    """A transport that sends nothing and keeps the gradients of each step, by shape."""

    bytes_sent = 0

    def __init__(self) -> None:
        self.kept = []

    def reduce(self, gradients):
        self.kept.append([one.clone() for one in gradients])

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def run(tiny, folder: Path, sparse: dict[str, Any], *, stop_at: int = 0, model=None, **more):
    spy, model = Spy(stop_at), tiny.tiny_model() if model is None else model
    settings = {**QUIET, **sparse, **more.pop("settings", {})}
    tiny.run(folder, tiny.settings(**settings), model=model, techniques=tiny.watching(spy=spy), heldout=[], **more)
    return model, spy.seen


@pytest.mark.parametrize("kind", ["columns", "rows", "layers", "freeze_prefix"])
def test_all_units_chosen_is_the_dense_run_and_counts_what_it_executes(tiny, tmp_path, kind):
    dense, plain = run(tiny, tmp_path / "dense", {})
    same, counted = run(tiny, tmp_path / "same", {"sparse_updates": {"kind": kind, "keep_fraction": 1.0}})
    for ours, theirs in zip(same.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    flops = [info.scalars["executed_flops"] for info in plain]
    assert [info.scalars["executed_flops"] for info in counted] == flops
    assert flops[0] == dense_flops(tiny.SHAPE, tiny.Rows().batch(0))


def test_a_frozen_prefix_keeps_weights_and_moments_and_the_rest_gets_the_dense_gradient(tiny, tmp_path):
    grads, whole, before = Grads(), Grads(), tiny.tiny_model()
    model, seen = run(
        tiny,
        tmp_path,
        {"sparse_updates": {"kind": "freeze_prefix", "keep_fraction": 0.5}},
        strategy=all_reduce_by(grads),
        settings={"checkpoint_every_steps": 12},
    )
    run(tiny, tmp_path / "whole", {}, strategy=all_reduce_by(whole))
    dense = dict(zip(dict(before.named_parameters()), whole.kept[0], strict=True))
    frozen = [name for name in dense if name.startswith("blocks.0.")]
    left = [dense[name] for name in dense if name not in frozen]
    for ours, theirs in zip(grads.kept[0][1:], left[1:], strict=True):  # the first is the embedding, here the head too
        torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(grads.kept[0][0], left[0])
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) == (name in frozen) for name, weight in before.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    shape, batch = tiny.SHAPE, tiny.Rows().batch(0)
    products = 2 * batch.num_tokens * (32 * 8 * 2 * 6 + 3 * 32 * 64)
    expected = 4 * (products + attention_flops(shape, batch, 0)) + 3 * head_flops(shape, batch)
    assert seen[0].scalars["executed_flops"] == expected


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_only_chosen_rows_have_a_gradient_and_those_of_the_last_projection_are_the_dense_ones(tiny, tmp_path, kind):
    found = {}
    for name, sparse in (
        ("sparse", {"sparse_updates": {"kind": kind, "keep_fraction": 0.25, "random_fraction": 0.0}}),
        ("dense", {}),
    ):
        grads = Grads()
        run(tiny, tmp_path / name, sparse, strategy=all_reduce_by(grads), settings={"num_steps": 1})
        found[name] = dict(zip(dict(tiny.tiny_model().named_parameters()), grads.kept[0], strict=True))
    for name, gradient in found["sparse"].items():
        if name.endswith("proj.weight"):
            assert int((gradient.abs().sum(dim=1) > 0).sum()) == len(gradient) // 4, name
    last = "blocks.1.ffn.down_proj.weight"
    rows = found["sparse"][last].abs().sum(dim=1) > 0
    torch.testing.assert_close(found["sparse"][last][rows], found["dense"][last][rows])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_run_that_stops_goes_on_with_the_same_bits(tiny, tmp_path, name):
    whole, seen = run(tiny, tmp_path / "whole", FORMS[name])
    with pytest.raises(Stopped):
        run(tiny, tmp_path / "cut", FORMS[name], stop_at=5)
    cut, _ = run(tiny, tmp_path / "cut", FORMS[name])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))
    flops = [column(read_records(tmp_path / one / "metrics.jsonl"), "executed_flops") for one in ("whole", "cut")]
    assert flops[0] == flops[1] == [(info.step, info.scalars["executed_flops"]) for info in seen]
    dense = [dense_flops(tiny.SHAPE, tiny.Rows().batch(number)) for number in range(12)]
    shares = [mine / whole for (_, mine), whole in zip(flops[0], dense, strict=True)]
    assert min(shares) < {"rows": 0.95}.get(name, 0.85)
    assert seen[-1].loss < seen[0].loss


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16_mixed", "int8"])
def test_other_number_formats_are_left_out_of_alike(tiny, tmp_path, policy):
    precision = {"settings": {"precision": {"policy": policy}}}
    _, plain = run(tiny, tmp_path / "plain", {}, **precision)
    _, whole = run(tiny, tmp_path / "whole", {"sparse_updates": {"kind": "columns", "keep_fraction": 1.0}}, **precision)
    _, half = run(tiny, tmp_path / "half", {"sparse_updates": {"kind": "columns", "keep_fraction": 0.5}}, **precision)
    assert [info.loss for info in whole] == pytest.approx([info.loss for info in plain], rel=1e-2)
    dense = [info.scalars["executed_flops"] for info in plain]
    assert [info.scalars["executed_flops"] for info in whole] == dense
    assert half[0].scalars["executed_flops"] < 0.75 * dense[0]
    assert half[-1].loss < half[0].loss - 0.2


def first_losses(tiny) -> list[float]:
    """The losses of the first batch's rows, over 8 tokens, by the weights with which runs begin."""
    batch, model = tiny.Rows().batch(0), tiny.tiny_model()
    with torch.no_grad():
        logits = model.logits(forward(model, batch))[:, :8]
    losses = []
    for row in range(8):
        each = F.cross_entropy(logits[row], batch.labels_BT[row, :8], ignore_index=IGNORED, reduction="none")
        losses.append(float(each[batch.labels_BT[row, :8] != IGNORED].mean()))
    return losses


def check_gradient_is_that_of(rows: list[int], sparse: dict[str, Any], tiny, tmp_path) -> None:
    """One step of two microbatches, beside a run that is given these rows and no others."""

    class Given:
        num_batches_per_epoch = 1

        def batch(self, index, *, rank=0, world_size=1):
            return tiny.Rows().batch(0).take(torch.tensor(rows))

    chosen, given = Grads(), Grads()
    run(
        tiny,
        tmp_path / "1",
        sparse,
        strategy=all_reduce_by(chosen),
        settings={"num_steps": 1, "gradient_accumulation_steps": 2},
    )
    run(
        tiny, tmp_path / "2", {}, strategy=all_reduce_by(given), objective=NextToken(Given()), settings={"num_steps": 1}
    )
    for ours, theirs in zip(chosen.kept[0], given.kept[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_rows_are_chosen_by_the_loss_of_their_first_tokens(tiny, tmp_path):
    """And the gradient is that of a run that is given these rows and no others."""
    losses = first_losses(tiny)
    best = sorted(sorted(range(8), key=lambda row: -losses[row])[:2])
    sparse = {"batch_selection": {"signal": "loss", "keep_fraction": 0.25, "probe_tokens": 8, "random_fraction": 0.0}}
    check_gradient_is_that_of(best, sparse, tiny, tmp_path)


@pytest.mark.parametrize("signal", ["loss", "random"])
def test_rows_that_the_first_weights_predict_worse_than_the_limit_are_never_learned(tiny, tmp_path, signal):
    """Three of eight are within it, where four may be chosen; they are no multiple of two microbatches."""
    losses = first_losses(tiny)
    order = sorted(range(8), key=lambda row: losses[row])
    limit = (losses[order[2]] + losses[order[3]]) / 2 / math.log(tiny.SHAPE.vocab_size)
    sparse = {"batch_selection": {"signal": signal, "keep_fraction": 0.5, "probe_tokens": 8, "max_initial_loss": limit}}
    check_gradient_is_that_of(sorted(order[:3]), sparse, tiny, tmp_path)


def test_where_no_row_is_within_the_limit_nothing_is_learned(tiny, tmp_path):
    """Nor do weights move: momentum would carry them on, and decay would hold."""
    sparse = {
        "batch_selection": {
            "signal": "loss_change",
            "keep_fraction": 0.5,
            "probe_tokens": 8,
            "max_initial_loss": 0.1,
            "dense_fraction": 0.5,
        }
    }
    _, seen = run(tiny, tmp_path / "1", sparse, settings={"num_steps": 4, "gradient_accumulation_steps": 2})
    assert [info.skipped for info in seen] == [False, False, True, True]
    assert seen[-1].scalars["empty"] == 1.0
    dense = dense_flops(tiny.SHAPE, tiny.Rows().batch(0))
    assert seen[-1].scalars["executed_flops"] < 0.5 * dense  # two rows of eight without labels, and the looks
    events = [json.loads(line) for line in next((tmp_path / "1").rglob("anomalies.jsonl")).read_text().splitlines()]
    assert [event["kind"] for event in events if event["step"] > 2] == ["empty_step"] * 2


def test_weights_and_moments_stay_where_nothing_is_learned(tiny, tmp_path):
    always = {"signal": "random", "keep_fraction": 0.5, "probe_tokens": 8, "max_initial_loss": 0.1}
    model, first = tiny.tiny_model(), tiny.tiny_model()
    run(tiny, tmp_path, {"batch_selection": always}, model=model, settings={"num_steps": 3, "weight_decay": 0.5})
    for mine, before in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, before)


def test_a_row_without_a_label_in_the_look_is_judged_by_its_tokens(tiny):
    """As a question is, whose answer comes later; padding and what follows another document never count."""
    batch = tiny.Rows().batch(0)
    labels, segments = batch.labels_BT.clone(), batch.segments_BT.clone()
    labels[:4, :8] = IGNORED
    segments[0, 3:], segments[1, 5:] = 1, -1
    look = first_tokens(replace(batch, labels_BT=labels, segments_BT=segments), 8)
    assert torch.equal(look.labels_BT[4:], labels[4:, :8])
    expected = batch.input_ids_BT[:4, 1:9].clone()
    expected[0, 2] = expected[1, 4] = IGNORED
    expected[1, 5:] = IGNORED
    assert torch.equal(look.labels_BT[:4], expected)
    choice = BatchSelector(
        BatchSelectionConfig(signal="loss", probe_tokens=8),
        tiny.tiny_model(),
        seed=0,
        rank=0,
        num_parts=1,
        executed=Executed(),
    )
    worth, _ = choice.look(replace(batch, labels_BT=torch.full_like(labels, IGNORED)))
    assert len(set(worth.tolist())) == 8  # every row has a loss of its own
    assert first_tokens(batch, batch.labels_BT.shape[1]).labels_BT.shape == batch.labels_BT.shape


def test_the_limit_is_that_of_the_weights_at_the_start(tiny, tmp_path):
    """Most rows stay beyond it, though all losses have fallen far below it."""
    sparse = {
        "batch_selection": {"signal": "random", "keep_fraction": 1.0, "probe_tokens": 8, "max_initial_loss": 0.99}
    }
    _, seen = run(tiny, tmp_path, sparse, settings={"num_steps": 30})
    assert min(info.loss for info in seen if info.loss) < 3.0  # the limit is 4.12
    dense = [dense_flops(tiny.SHAPE, tiny.Rows().batch(info.step - 1)) for info in seen]
    shares = [info.scalars["executed_flops"] / whole for info, whole in zip(seen, dense, strict=True)]
    assert sum(shares[10:]) / len(shares[10:]) < 0.6


def test_a_look_costs_its_first_tokens_only(tiny, tmp_path):
    """All rows chosen, so that what is more than the dense step is the look: forward only, 4 of 32 tokens."""
    _, seen = run(tiny, tmp_path, {"batch_selection": {"signal": "loss", "keep_fraction": 1.0, "probe_tokens": 4}})
    for info in seen:
        dense = dense_flops(tiny.SHAPE, tiny.Rows().batch(info.step - 1))
        assert 0.02 < info.scalars["executed_flops"] / dense - 1 < 0.05


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("compile", {"compile": True}),
        ("optimizer", {"optimizer": "lion"}),
        ("optimizer_cpu_offload", {"optimizer_cpu_offload": True}),
        ("gradient_sync.kind", {"gradient_sync": {"kind": "int8"}}),
        ("gradient_sync.local_sgd", {"gradient_sync": {"local_sgd": {"sync_every_steps": 2}}}),
        ("async_updates.mode", {"async_updates": {"mode": "delayed"}}),
    ],
)
def test_what_does_not_go_together_is_named(tiny, field, more):
    with pytest.raises(ConfigError, match=rf"^sparse_updates\.kind: layers needs .*, which {field}.* takes away"):
        tiny.settings(**QUIET, sparse_updates={"kind": "layers"}, **more)


def test_too_few_rows_for_the_microbatches_are_named(tiny, tmp_path):
    sparse = {"batch_selection": {"signal": "random", "keep_fraction": 0.5}}
    with config_error("batch_selection.keep_fraction"):
        run(tiny, tmp_path, sparse, settings={"gradient_accumulation_steps": 16, "batch_tokens": 512})
    with config_error("batch_selection.keep_fraction"):
        run(tiny, tmp_path, sparse, settings={"gradient_accumulation_steps": 8})
