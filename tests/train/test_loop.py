"""The loop: what a step computes, what is recorded, how it stops, resumes and gives up."""

import json
import math
import os
import signal
import sys

import pytest
import torch
import torch.nn.functional as F

from modelwright.core.artifacts import ArtifactError, StageDir
from modelwright.core.config import ModelwrightError, Stopped
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED
from modelwright.objectives.next_token import NextToken
from modelwright.train.job import load_best
from modelwright.train.objective import Terms, forward
from modelwright.train.precision import apply
from modelwright.train.techniques.adaptive_precision import SensitivityTrials
from tolerances import TOLERANCES

EXACT = {"rtol": 1e-11, "atol": 1e-13}
CLOSE = TOLERANCES["fp32_trained"]


class Spy:
    """A controller that keeps what it saw, calls a hook, and has a state with a tensor in it."""

    every = 1

    def __init__(self, hook=lambda info: None):
        self.seen, self.hook, self.total = [], hook, torch.zeros(3)

    def observe(self, info):
        self.seen.append(info)
        self.total += info.loss
        self.hook(info)

    def state_dict(self):
        return {"total": self.total, "count": len(self.seen)}

    def load_state_dict(self, state):
        self.total = state["total"]


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_microbatches_do_not_change_the_gradient(tiny, tmp_path, parts):
    models = [
        tiny.run_in_float64(tmp_path / str(number), tiny.settings(gradient_accumulation_steps=number, num_steps=6))
        for number in (1, parts)
    ]
    for whole, split in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(split, whole, **EXACT)


def test_first_update_is_adamw_on_the_mean_over_all_targets(tiny, tmp_path):
    model, reference = tiny.tiny_model(), tiny.tiny_model()
    constant = {"kind": "constant", "warmup_fraction": 0.0}
    config = tiny.settings(num_steps=1, gradient_accumulation_steps=4, adam_eps=1e-3, schedule=constant)
    spy = Spy()
    tiny.run(tmp_path, config, model=model, techniques=tiny.watching(spy=spy), heldout=[])

    batch = tiny.Rows().batch(0)
    logits = reference.logits(forward(reference, batch)).flatten(0, 1)
    loss = F.cross_entropy(logits, batch.labels_BT.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    decay = [{"params": [p for p in reference.parameters() if (p.dim() >= 2) == matrix], "weight_decay": w}
             for matrix, w in ((True, 0.1), (False, 0.0))]  # fmt: skip
    torch.optim.AdamW(decay, lr=1e-2, betas=(0.9, 0.95), eps=1e-3).step()

    assert spy.seen[0].loss == pytest.approx(loss.item(), rel=1e-5)
    assert spy.seen[0].grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_utilization_stays_below_one_when_the_peak_was_measured_too_low(tiny, tmp_path):
    """As on a machine that was busy: the fastest step becomes the peak."""
    result = tiny.run(tmp_path, peak_flops=1.0)
    records = read_records(StageDir(tmp_path).metrics)
    assert all(0 < value <= 1 for _, value in column(records, "mfu"))
    peaks = [value for _, value in column(records, "peak_flops")]
    assert peaks == sorted(peaks)
    assert peaks[0] > 1e3
    assert 0 < result.mfu <= 1
    assert result.peak_flops == peaks[-1]


def test_metrics_and_result(tiny, tmp_path):
    result = tiny.run(tmp_path)
    records = read_records(StageDir(tmp_path).metrics)
    losses = column(records, "loss")
    assert [step for step, _ in losses] == list(range(1, 13))
    assert [step for step, _ in column(records, "heldout_loss")] == [3, 6, 9, 12]
    assert losses[-1][1] < losses[0][1] - 0.3
    assert result.loss == losses[-1][1]
    assert result.best.loss == min(value for _, value in column(records, "heldout_loss"))
    first = records[0]
    flops = 3 * tiny.SHAPE.flops_per_token(_mean_context(tiny)) * first["num_tokens"]
    assert first["mfu"] == pytest.approx(flops / first["step_time_s"] / 1e12)
    assert result.num_tokens == sum(value for _, value in column(records, "num_tokens"))
    assert result.mfu == pytest.approx(result.model_flops / result.train_time_s / 1e12)
    assert first["learning_rate"] == pytest.approx(1e-2)
    assert records[-1]["step"] == 12


def _mean_context(tiny):
    batch = tiny.Rows().batch(0)
    real = batch.segments_BT >= 0
    return ((batch.positions_BT + 1)[real]).double().mean().item()


def test_heldout_loss_is_normalized_over_the_whole_set(tiny, tmp_path):
    model, heldout = tiny.tiny_model(), [tiny.Rows().batch(7), tiny.Rows(num_rows=1).batch(8)]
    result = tiny.run(tmp_path, tiny.settings(num_steps=1), model=model, heldout=heldout)
    total = count = 0.0
    for batch in heldout:
        logits = model.logits(forward(model, batch)).flatten(0, 1)
        total += F.cross_entropy(logits, batch.labels_BT.flatten(), ignore_index=IGNORED, reduction="sum").item()
        count += batch.num_targets
    assert result.heldout_loss == pytest.approx(total / count, rel=1e-5)


def test_resume_is_bit_identical_with_other_microbatches_refused_for_other_inputs(tiny, tmp_path):
    tiny.run(tmp_path / "whole")

    def stop(info):
        if info.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    rows = tiny.Rows()
    with pytest.raises(Stopped, match="step 5 of 12"):
        tiny.run(tmp_path / "cut", techniques=tiny.watching(spy=Spy(stop)))
    spy = Spy()
    result = tiny.run(tmp_path / "cut", objective=NextToken(rows), techniques=tiny.watching(spy=spy))
    assert rows.calls == list(range(5, 12))
    assert equal(tiny.final_weights(tmp_path / "whole"), tiny.final_weights(tmp_path / "cut"))
    whole, cut = (column(read_records(tmp_path / name / "metrics.jsonl"), "loss") for name in ("whole", "cut"))
    assert whole == cut
    assert spy.total[0] == pytest.approx(sum(loss for _, loss in whole), rel=1e-5)
    assert result.num_steps == 12

    with pytest.raises(ArtifactError, match="another configuration"):
        tiny.run(tmp_path / "cut", input_digest="other", techniques=tiny.watching(spy=spy))


def test_a_signal_in_the_last_step_stops_what_encloses_the_training(tiny, tmp_path):
    """Else the next stage of a run, or the next run of an experiment, would begin."""

    def stop(info):
        if info.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit, match="143"):
            tiny.run(tmp_path, techniques=tiny.watching(spy=Spy(stop)))
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = tiny.Rows()
    assert tiny.run(tmp_path, objective=NextToken(rows), techniques=tiny.watching(spy=Spy())).num_steps == 12
    assert rows.calls == []


def test_stop_before_an_evaluation_evaluates_after_resume(tiny, tmp_path):
    def stop(info):
        if info.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        tiny.run(tmp_path, techniques=tiny.watching(spy=Spy(stop)))
    tiny.run(tmp_path, techniques=tiny.watching(spy=Spy()))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [step for step, _ in column(records, "heldout_loss")] == [3, 6, 9, 12]


def test_finished_run_does_nothing_again(tiny, tmp_path):
    first = tiny.run(tmp_path)
    model, rows = tiny.tiny_model(), tiny.Rows()
    again = tiny.run(tmp_path, objective=NextToken(rows), model=model)
    assert rows.calls == []
    assert again == first
    assert equal(model.state_dict(), tiny.final_weights(tmp_path))


def test_best_weights_can_be_loaded(tiny, tmp_path):
    config = tiny.settings(learning_rate=0.3, keep_last=1, max_grad_norm=0.0, num_steps=15)
    result = tiny.run(tmp_path, config)
    model = tiny.tiny_model()
    load_best(model, StageDir(tmp_path), result.best)
    assert equal(model.state_dict(), tiny.final_weights(tmp_path, result.best.step))


class Poisoned(NextToken):
    """Gives infinite losses in some batches."""

    def losses(self, output, batch, model):
        bad = math.inf if self.source.calls[-1] in (3, 4) else 1.0
        return Terms({"loss": super().losses(output, batch, model).losses["loss"] * bad})


def test_a_step_that_is_not_finite_is_skipped(tiny, tmp_path):
    before = {}
    model = tiny.tiny_model()

    def keep(info):
        before[info.step] = [p.detach().clone() for p in model.parameters()]

    spy = Spy(keep)
    result = tiny.run(
        tmp_path, model=model, objective=Poisoned(tiny.Rows()), techniques=tiny.watching(spy=spy), heldout=[]
    )
    assert [info.step for info in spy.seen if info.skipped] == [4, 5]
    assert all(torch.equal(a, b) for a, b in zip(before[3], before[5], strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert result.summary_of("finite_check")["num_skipped"] == 2
    assert result.summary_of("anomalies")["num_events"]["nonfinite_step"] == 2


def test_a_diverged_run_gives_up(tiny, tmp_path):
    config = tiny.settings(max_skipped_steps=2)
    with pytest.raises(ModelwrightError, match=r"step 5: .* 2 steps in a row; lower the learning rate"):
        tiny.run(tmp_path, config, objective=Poisoned(tiny.Rows()))


def test_bf16_compute_keeps_fp32_weights_and_learns(tiny, tmp_path):
    model = tiny.tiny_model()
    result = tiny.run(tmp_path, tiny.settings(precision={"policy": "bf16_mixed"}), model=model)
    plain = tiny.run(tmp_path / "fp32")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert result.loss == pytest.approx(plain.loss, rel=0.02)
    assert result.loss != plain.loss


def test_unsettled_precision_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="resolve it from measured rates"):
        tiny.run(tmp_path, tiny.settings(precision={"policy": "auto"}))


def test_what_a_machine_can_do_is_written_where_no_folder_is_yet(tiny, tmp_path):
    """Adaptive precision measures before anything else of a run is written."""
    folder = tmp_path / "not" / "yet"
    adaptive = {"policy": "fp32", "adaptive": {"kind": "rules", "decide_every_steps": 2, "measure_steps": 1}}
    tiny.run(folder, tiny.settings(num_steps=2, precision=adaptive), heldout=[])
    assert (folder / "formats.json").exists()


@pytest.mark.parametrize(("seconds", "looks"), [(1.0, True), (3.9, False)])
def test_formats_that_would_gain_nothing_are_not_looked_at(tiny, tmp_path, monkeypatch, seconds, looks):
    """BF16 would make a part faster by less than a tenth; INT8 would make it slower."""
    known = {f"{part}/{name}": value for part in ("attention", "ffn") for name, value in
             (("fp32", 4.0), ("bf16", seconds), ("int8", 5.0))}  # fmt: skip
    (tmp_path / "formats.json").write_text(json.dumps({**known, "memory": 0.1}))
    tried = []

    def begin(self, present, pairs):
        tried.append(["fp32", *dict.fromkeys(chosen for _, chosen in pairs)])

    monkeypatch.setattr(SensitivityTrials, "begin", begin)
    adaptive = {
        "policy": "fp32",
        "adaptive": {"kind": "rules", "decide_every_steps": 2, "measure_steps": 1, "tolerance": 0.5},
    }
    tiny.run(tmp_path, tiny.settings(num_steps=4, precision=adaptive), heldout=[])
    assert tried == [["fp32", "bf16"]] * 2 * looks
    assert (tmp_path / "formats.jsonl").exists() == looks


def test_who_multiplies_is_chosen_for_the_run_alone(tiny, tmp_path, monkeypatch):
    """Each step sees the choice; after the run all is as before."""
    for check in ("onednn_multiplies", "_products_are_exact"):
        monkeypatch.setattr(apply, check, lambda: True)  # wherever this runs

    class Seen:
        every = 1

        def __init__(self) -> None:
            self.found = []

        def observe(self, info):
            self.found.append(torch.get_float32_matmul_precision())

        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    for onednn in (False, True):
        seen = Seen()
        settings = tiny.settings(
            num_steps=2, precision={"policy": "fp32", "fp32_matmul": "onednn" if onednn else "default"}
        )
        tiny.run(tmp_path / str(onednn), settings, techniques=tiny.watching(seen=seen))
        assert seen.found == ["medium" if onednn else before[0]] * 2
        assert (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32) == before
