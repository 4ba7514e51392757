"""The stages student and distill: pruned and scratch students, teachers of the run and from folders, completions of the
student's own, refusals.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hf_folders import WINDOW, write_folder
from modelwright.cli.main import main
from modelwright.core.artifacts import MANIFEST, RunDir, read_manifest
from modelwright.core.config import ConfigError
from modelwright.core.records import column, read_records
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import ModelConfig
from modelwright.model.hf import load_config, load_model
from modelwright.objectives.distillation import OnPolicyConfig
from modelwright.pipeline.stages.distill import DistillConfig
from modelwright.pipeline.stages.student import StudentConfig

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]
STAGES = "clean,tokenize,pack,pretrain,student,distill,report"
SETTINGS = (
    "--distill.num_steps=8", "--distill.batch_tokens=512", "--distill.eval_every_steps=4",
    "--distill.checkpoint_every_steps=4", "--distill.hidden=[1,0,0.25]", "--distill.attention=[1,0.25,0.5]",
    "--distill.logits=[1,0.5,1]", "--distill.temperature=2.5", "--distill.label_share=0.5",
)  # fmt: skip
"""The published phases, one after the other."""


@pytest.fixture(scope="module")
def run(small_words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A pruned student learns from the run's own model."""
    run = RunDir(tmp_path_factory.mktemp("distill") / "run")
    words = [
        *small_words, "--run-dir", str(run.path), "--stages", STAGES, *SETTINGS, "--student.num_layers=1",
        "--student.ffn_dim=32", "--distill.cache_top_k=16",
    ]  # fmt: skip
    assert main(words) == 0
    return run


@pytest.mark.slow
def test_a_pruned_student_learns_from_the_runs_model(run: RunDir) -> None:
    teacher, student = (load_config(run.stage(name).artifact) for name in ("pretrain", "distill"))
    assert (student.num_layers, student.ffn_dim) == (1, 32)
    assert student.model_dim == teacher.model_dim
    records = read_records(run.stage("distill").metrics)
    terms = {
        name: [value for _, value in column(records, f"loss/{name}")] for name in ("hidden", "attention", "logits")
    }
    on = {name: [value > 0 for value in values] for name, values in terms.items()}
    assert on["hidden"] == [True] * 2 + [False] * 6
    assert on["attention"] == [False] * 2 + [True] * 2 + [False] * 4
    assert on["logits"] == [False] * 4 + [True] * 4
    divergences = [value for _, value in column(records, "heldout/divergence")]
    assert divergences[-1] < divergences[0]
    facts = read_manifest(run.stage("distill").artifact).facts
    assert facts["comparison"]["parameters"] == [teacher.num_parameters, student.num_parameters]
    assert all(min(pair) > 0 for pair in facts["comparison"]["bits_per_byte"].values())
    assert list((run.stage("distill").path / "teacher").rglob("*.safetensors"))
    page = run.report.read_text()
    assert "The student beside its teacher" in page
    assert "bits per byte, code" in page


@pytest.mark.slow
def test_another_run_takes_a_teacher_from_a_folder(
    run: RunDir, inside: Command, small_words: tuple[str, ...], tmp_path: Path
) -> None:
    """From scratch, and with logits alone; the folder's tokenizer is the run's, since the run starts from it."""
    teacher = tmp_path / "teacher"
    shutil.copytree(run.stage("pretrain").artifact, teacher, ignore=shutil.ignore_patterns(MANIFEST))
    words = [
        *small_words, "--run-dir", str(run.path), "--stages=clean,tokenize,pack,student,distill", *SETTINGS,
        "--student.num_layers=1", "--student.teacher", str(teacher), "--student.init=scratch", "--student.model_dim=16",
        "--student.ffn_dim=24",
        "--student.num_heads=2", "--student.num_kv_heads=1", "--student.head_dim=8", "--distill.hidden=[0,0,1]",
        "--distill.attention=[0,0,1]", "--distill.logits=[1,0,1]", "--distill.num_steps=3",
    ]  # fmt: skip
    done = inside(*words)
    assert done.returncode == 0, done.stderr
    student = load_model(run.stage("distill").artifact)
    assert student.config.model_dim == 16
    assert not student.heads
    tokenizer = train_tokenizer(["other words in another language"] * 3, TokenizerConfig(vocab_size=300))
    tokenizer.save(teacher)
    refused = inside(*words)
    assert refused.returncode != 0
    assert "student.teacher" in refused.stderr
    assert "has another tokenizer than the run" in refused.stderr


SECOND_STAGES = "--stages=clean,tokenize,pack,student,distill"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("gemma2", lambda shape: shape.attention.soft_cap > 0 and shape.norms.post_norms),
        ("phi3-window", lambda shape: shape.window_of(0) == WINDOW),
        ("qwen3", lambda shape: shape.qk_norm),
    ],
)
def test_a_folder_of_another_type_is_a_teacher(
    name: str,
    feature: Callable[[ModelConfig], bool],
    run: RunDir,
    inside: Command,
    small_words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """A folder that `transformers` has written: its student is pruned from it and is of its type, and learns all three
    parts.
    """
    tokenizer = Tokenizer.load(run.stage("tokenize").artifact)
    write_folder(name, tmp_path, vocab_size=tokenizer.vocab_size)
    tokenizer.save(tmp_path)
    done = inside(
        *small_words, "--run-dir", str(run.path), SECOND_STAGES, *SETTINGS, "--student.teacher", str(tmp_path),
        "--student.num_layers=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    student = load_model(run.stage("distill").artifact).config
    assert student.num_layers == 1
    assert feature(student)
    records = read_records(run.stage("distill").metrics)
    for part, first, last in (("hidden", 1, 2), ("attention", 3, 4), ("logits", 5, 8)):
        found = dict(column(records, f"loss/{part}"))
        assert [step for step, value in found.items() if value > 0] == list(range(first, last + 1)), part


ONLY_LOGITS = ("--distill.hidden=[0,0,1]", "--distill.attention=[0,0,1]", "--distill.logits=[1,0,1]")


@pytest.mark.slow
def test_a_student_learns_from_its_own_completions(run: RunDir, inside: Command, small_words: tuple[str, ...]) -> None:
    done = inside(
        *small_words, "--run-dir", str(run.path), "--stages=clean,tokenize,pack,pretrain,student,distill", *SETTINGS,
        *ONLY_LOGITS, "--student.num_layers=1", "--distill.on_policy.share=0.5",
        "--rollout.max_completion_length=12", "--distill.divergence=jsd",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = read_records(run.stage("distill").metrics)
    lengths = dict(column(records, "completions/mean_length"))
    assert 0 < len(lengths) < 8
    assert all(1 <= length <= 12 for length in lengths.values())
    assert dict(column(records, "on_policy/divergence")).keys() == lengths.keys()


def test_a_cache_and_a_teacher_in_parts_are_refused(
    run: RunDir, command: Command, small_words: tuple[str, ...]
) -> None:
    """On two processes, with ZeRO-3."""
    done = command(
        *small_words, "--run-dir", str(run.path), "--stages=clean,tokenize,pack,pretrain,student,distill", *SETTINGS,
        *ONLY_LOGITS, "--student.num_layers=1", "--distill.cache_top_k=4", "--parallel.zero_stage=3", "--nproc", "2",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "distill.cache_top_k: rows that are not stored yet need the whole teacher on every process" in done.stderr
    assert "choose a lower stage or no cache" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--student.ffn_dim=999"], "student.ffn_dim: 999 is more than the teacher's"),
        (["--student.num_layers=99"], "student.num_layers: 99 is more than the teacher's"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused_before_anything_is_made(
    words: list[str], message: str, inside: Command, small_words: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = inside(
        *small_words, "--run-dir", str(folder), "--stages", STAGES, *SETTINGS, "--student.num_layers=1", *words
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert not (folder / "clean").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "", "init": "continue"}, "teacher: init continue trains the run's model"),
        ({"teacher": "t", "init": "continue", "num_layers": 1}, "init: continue keeps the shape"),
        ({"num_layers": -1}, "num_layers: must not be negative"),
    ],
)
def test_students_that_cannot_be_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StudentConfig(**settings)


def test_an_error_about_the_student_names_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    stages = "clean,tokenize,pack,pretrain,student,distill"
    assert main(["run", "tiny", "--stages", stages, "--student.num_layers", "99", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("modelwright: student.num_layers: 99 is more than the teacher's")


def test_a_student_is_smaller_than_its_teacher() -> None:
    teacher = ModelConfig(
        vocab_size=64, num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=64, head_dim=8, max_seq_len=32
    )
    assert StudentConfig(num_layers=2).shape(teacher) == replace(teacher, num_layers=2)
    for settings, message in (
        ({}, "the student has the teacher's shape"),
        ({"num_layers": 5}, "num_layers: 5 is more than the teacher's 4"),
        ({"model_dim": 16}, "model_dim: 16 differs from the teacher's 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            StudentConfig(**settings).shape(teacher)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logits": (1.0, 0.5, 0.9)}, "logits: no part of the loss lasts until the end"),
        ({"hidden": (1.0, 0.5, 0.2)}, "hidden: must be a weight that is not negative"),
        ({"temperature": 0.0}, "temperature: must be above 0"),
        ({"label_share": 1.5}, "label_share"),
        ({"divergence": "jsd", "jsd_beta": 1.0}, "jsd_beta: must be between 0 and 1"),
        (
            {"divergence": "reverse_kl", "cache_top_k": 8},
            "cache_top_k: stored probabilities give the divergence",
        ),
        ({"on_policy": OnPolicyConfig(share=0.5), "cache_top_k": 8}, "cache_top_k: completions of the student are new"),
        (
            {"on_policy": OnPolicyConfig(share=0.5), "logits": (0.0, 0.0, 1.0), "hidden": (1.0, 0.0, 1.0)},
            "on_policy.share: is the share of the part logits",
        ),
    ],
)
def test_settings_of_distillation_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillConfig(**settings)


def test_a_distillation_that_an_earlier_version_has_finished_stays_finished() -> None:
    """Settings that it did not know are no part of what identifies a training, unless they change it."""
    known = DistillConfig(num_steps=1).identity()
    assert {"divergence", "jsd_beta", "on_policy", "rollout"} & known.keys() == set()
    assert known["layer_map"] == []
    for settings in (
        {"divergence": "jsd"},
        {"on_policy": OnPolicyConfig(share=0.5)},
        {"layer_map": (1,)},
    ):
        assert DistillConfig(num_steps=1, **settings).identity() != known
