"""The claim on distillation: its verdict from given samples, scores and equal time, and its arms as tiny runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.distillation import Distillation
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import single
from modelwright_claims import distillation as arms
from modelwright_claims import distillation as claim
from modelwright_claims.claim import Setting, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.training_run import Outcome, Processes
from modelwright_claims.workbench import VOCAB_SIZE, Size

TINY = Size(model_dim=64, num_layers=2, seq_len=32, batch_rows=4, num_steps=4)
SMALLER = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 16}
GUESS, NOISE = 0.1, (0.0, 0.001, 0.002, 0.001, 0.0)


def bench(folder: Path, **changes: Any) -> arms.Bench:
    return arms.Bench(
        Setting(folder=folder, quick=True, progress=SilentProgress()),
        **{
            "teacher": TINY,
            "shape": SMALLER,
            "num_steps": 4,
            "new_text_steps": 8,
            "teacher_rates": (4e-3,),
            "rates": (4e-3,),
            "seeds": (501, 502),
            "processes": Processes(),
            "at_once": 1,
            "num_timed_steps": 5,
            "num_rounds": 1,
            **changes,
        },
    )


def comparison(*, size: int = 250, **accuracies: float) -> arms.Comparison:
    """Return a comparison of given accuracies, by the arm's name with underscores; differences between arms vary with
    the seed.
    """
    means = {
        "three phases": 0.495,
        "logits only": 0.49,
        "pruned, labels only": 0.48,
        "from scratch": 0.47,
        "logits only, as much time": 0.49,
        "pruned, labels only, as much time": 0.485,
        "from scratch, as much time": 0.48,
        "three phases, new text": 0.5,
    }
    means |= {name.replace("__", ", ").replace("_", " "): value for name, value in accuracies.items()}
    return arms.Comparison(
        rates=dict.fromkeys(means, 4e-3),
        num_steps=dict.fromkeys(means, 4),
        scores={
            arms.TEACHER: [arms.Score(accuracy=0.5, loss=1.9)],
            arms.TEACHER + arms.NEW_TEXT: [arms.Score(accuracy=0.6, loss=1.7)],
        }
        | {
            name: [arms.Score(accuracy=mean + (1 + 0.1 * number) * one, loss=2.0) for one in NOISE]
            for number, (name, mean) in enumerate(means.items())
        },
        step_s={name: [0.1] for name in (arms.METHOD, *arms.RIVALS)},
        guess=GUESS,
        num_parameters=(1000, size),
    )


def judged(tmp_path: Path, **changes: Any) -> Verdict:
    return judge(claim.CLAIM, claim.measurement(comparison(**changes), bench(tmp_path)))


def test_met_needs_the_share_and_every_rival(tmp_path: Path) -> None:
    met = judged(tmp_path)
    assert met.kind == "met", met.reason
    assert set(claim.CLAIM.headline) <= set(met.figures)
    assert met.figures["share of the teacher's score, three phases"].value == pytest.approx(0.3958 / 0.4)
    new = met.figures["share of the teacher's score, three phases, new text"]
    assert new.value == pytest.approx(0.401 / 0.5, abs=0.001)
    assert f"on new text three phases {new.value:.1%}" in met.reason
    for changes, reason in (
        ({"three_phases": 0.487}, "share of the teacher's score"),
        ({"from_scratch": 0.4953}, "accuracy above from scratch"),
        ({"from_scratch__as_much_time": 0.5}, "accuracy above from scratch, as much time"),
        ({"logits_only": 0.5}, "logits only is better"),
        ({"logits_only__as_much_time": 0.5}, "logits only, as much time is better"),
        ({"pruned__labels_only__as_much_time": 0.5}, "pruned, labels only, as much time is better"),
        ({"size": 251}, "parameters of the student"),
    ):
        verdict = judged(tmp_path, **changes)
        assert verdict.kind == "short", changes
        assert reason in verdict.reason, changes


def test_the_student_has_at_most_a_quarter_of_the_parameters(tmp_path: Path) -> None:
    made = arms.Bench(Setting(folder=tmp_path, quick=False, progress=SilentProgress()))
    teacher = made.teacher_run(4e-3)
    shapes = [run.model_config(VOCAB_SIZE).num_parameters for run in (teacher, made.arms(teacher)[arms.METHOD])]
    assert 0.23 < shapes[1] / shapes[0] <= claim.TARGET_SIZE


def test_a_rival_that_is_as_good_is_no_obstacle_unless_it_is_from_scratch(tmp_path: Path) -> None:
    assert judged(tmp_path, logits_only=0.495).kind == "met"
    assert judged(tmp_path, from_scratch=0.495).kind == "short"


def test_a_record_without_an_arm_is_not_judged(tmp_path: Path) -> None:
    found = claim.measurement(comparison(), bench(tmp_path))
    lacking = {name: values for name, values in found.samples.items() if "from scratch, as much time" not in name}
    verdict = judge(claim.CLAIM, replace(found, samples=lacking))
    assert verdict.kind == "not judged"
    assert "from scratch, as much time" in verdict.reason


def test_scores_are_those_of_single_tokens() -> None:
    shape = ModelConfig(
        vocab_size=32, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8, max_seq_len=16
    )
    model = Decoder(replace(shape, init_std=0.5)).eval()
    model.init_weights(0)
    unlabeled = TokenBatch.of_sequences([[(5 * place + row) % 32 for place in range(16)] for row in range(6)])
    attend = packed_attend(unlabeled.segments_BT)
    with torch.no_grad():
        logits = model.logits(model(unlabeled.input_ids_BT, unlabeled.positions_BT, attend))
    labels = torch.full((6, 16), -100)
    labels[:, :4], labels[:3, :2] = 7, logits[:3, :2].argmax(-1)
    batch = replace(unlabeled, labels_BT=labels)
    places = [(row, place) for row in range(6) for place in range(4)]
    right = sum(int(logits[place].argmax()) == int(labels[place]) for place in places)
    assert 6 <= right < 24
    assert arms.accuracy(model, [batch]) == right / 24
    assert arms.accuracy(model, batch.split(3)) == right / 24
    most = max(sum(int(labels[place]) == token for place in places) for token in range(32))
    assert arms.constant_accuracy(batch.split(2)) == pytest.approx(most / 24)


def test_equal_time_is_by_the_seconds_of_a_step(tmp_path: Path) -> None:
    """The time is that of each quarter of a run: the phases take different times, and a slow first step is none of
    them.
    """
    ends = [0.0, 5.0, 5.1, 5.2, 5.5, 5.8, 6.1, 6.3, 6.5, 6.7, 7.1, 7.5, 7.9]
    outcome = Outcome(heldout_loss=1.0, seconds=1.0, steps={"ended_s": ends})
    assert arms.mean_step_s(outcome) == pytest.approx((0.1 + 0.3 + 0.2 + 0.4) / 4)
    made = bench(tmp_path, num_steps=100)
    rivals = {name: made.arms(made.teacher_run(4e-3))[name] for name in arms.RIVALS}
    step_s = {arms.METHOD: [0.2, 0.1], arms.LOGITS: [0.16], arms.PRUNED: [0.05], arms.SCRATCH: [0.049]}
    steps = {name: run.size.num_steps for name, run in made.in_time(rivals, step_s).items()}
    assert steps == {
        "logits only, as much time": 95,
        "pruned, labels only, as much time": 300,
        "from scratch, as much time": 310,
    }


def test_students_learn_what_the_product_would_teach_them(text_folder: Path) -> None:
    made = bench(text_folder)
    every = made.arms(made.teacher_run(4e-3))
    labels, teacher = NextToken(source=None), Decoder(made.shape_of(made.teacher_run(4e-3)))  # pyright: ignore
    method, logits = (arms.learned(every[name], teacher, single(), labels) for name in (arms.METHOD, arms.LOGITS))
    assert isinstance(method, Distillation)
    assert isinstance(logits, Distillation)
    assert [method.settings.used, logits.settings.used] == [["hidden", "attention", "logits"], ["logits"]]
    assert (method.num_steps, method.settings.temperature, method.settings.label_share) == (4, 1.0, 0.2)
    assert arms.learned(every[arms.SCRATCH], teacher, single(), labels) is labels


@pytest.mark.slow
def test_a_student_comes_from_its_teacher_and_its_loss_is_that_of_the_labels(text_folder: Path, tmp_path: Path) -> None:
    """The student is made in a separate process, which ends with the same bits as in this one."""
    made = bench(text_folder)
    teacher = made.teacher_run(4e-3)
    arms.execute_student(made.setting, teacher, keep=tmp_path / "teacher")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outcomes = {}
        for threads in (0, 1):
            run = replace(made.arms(teacher)[arms.METHOD], processes=Processes(threads=threads))
            keep = tmp_path / f"student-{threads}"
            outcomes[threads] = arms.execute_student(made.setting, run, begin=tmp_path / "teacher", keep=keep)
    finally:
        torch.set_num_threads(before)
    assert outcomes[0].heldout_loss == outcomes[1].heldout_loss
    assert outcomes[0].losses == outcomes[1].losses
    student = arms.loaded(made.shape_of(made.arms(teacher)[arms.METHOD]), tmp_path / "student-1")
    batches = arms.heldout_batches(made.setting, made.arms(teacher)[arms.METHOD])
    assert arms.score(student, batches).loss == pytest.approx(outcomes[1].heldout_loss, rel=1e-6)


@pytest.mark.slow
def test_the_arms_are_made_and_scored(text_folder: Path) -> None:
    made = bench(text_folder)
    found = made.compare()
    in_time = [name + arms.IN_TIME for name in arms.RIVALS]
    small = [arms.TEACHER, arms.METHOD, *arms.RIVALS, *in_time]
    new = [name + arms.NEW_TEXT for name in (arms.TEACHER, arms.METHOD, *arms.RIVALS)]
    assert [*found.scores] == [*found.rates] == [*small, *new]
    assert [found.num_steps[name] for name in (arms.TEACHER, arms.TEACHER + arms.NEW_TEXT)] == [4, 8]
    every = [one for scores in found.scores.values() for one in scores]
    assert all(len(scores) == (1 if arms.TEACHER in name else 2) for name, scores in found.scores.items())
    assert all(math.isfinite(one.loss) and 0 <= one.accuracy <= 1 for one in every)
    assert [*found.step_s] == [arms.METHOD, *arms.RIVALS]
    assert found.num_parameters[1] < found.num_parameters[0]
    assert judge(claim.CLAIM, claim.measurement(found, made)).kind in ("met", "short")
