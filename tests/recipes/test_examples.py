"""The examples run as they stand, at their own small sizes, and what is custom in them has an effect: weights, figures
and documents differ from those of a run without it. Files for clusters are in tests/pipeline/test_cluster_examples.py,
those that deploy a server in tests/serve.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import modelwright as mw
from continual_update import QUICK, new_records, old_records, write_records
from finetune_files import write_examples, write_model
from modelwright.core.artifacts import read_manifest
from modelwright.core.config import ConfigError
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.reward.build import build_reward
from modelwright.reward.reward import Sample
from rank_processes import start_process

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS, EXTENSION = EXAMPLES / "python", EXAMPLES / "extension"


def run_script(name: str, *words: object, cwd: Path) -> str:
    code, output, errors = start_process(SCRIPTS / f"{name}.py", *words, cwd=cwd).end()
    assert code == 0, output[-2000:] + errors[-2000:]
    return output


def digest(run: Path, stage: str) -> str:
    return read_manifest(run / stage / "artifact", kind=stage).content_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mine")


def test_every_example_is_short_says_what_it_does_and_is_listed() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sbatch", ".yaml", ".toml")]
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.name != "__init__.py":
            assert f"({path.relative_to(EXAMPLES).as_posix()})" in table, path
        if path.parent.name in ("python", "my_parts") and path.name != "__init__.py":
            assert len(lines) < 60, path
            assert all(line.startswith("# ") for line in lines[:3]), path
    listed = re.findall(r"\]\(([\w/.]+)\)", table)
    assert [link for link in listed if not (EXAMPLES / link).exists()] == []


@pytest.mark.slow
def test_train(tmp_path: Path) -> None:
    text = "\n".join(TEXT.format(n=n, m=n + 1, t=3 * n) for n in range(2000))
    (tmp_path / "text.txt").write_text(text)
    output = run_script("train", "text.txt", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^pretrain \d+/20: loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "runs/from-python/report.html").is_file()


def test_own_model(tmp_path: Path) -> None:
    output = run_script("own_model", cwd=tmp_path)
    (loss,) = re.findall(r"loss ([\d.]+) after 40 steps", output)
    assert float(loss) < 1.0, "of 3.5 for a guess"


@pytest.mark.slow
def test_finetune(model: Path, tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl")
    output = run_script("finetune", model, tmp_path / "examples.jsonl", cwd=tmp_path)
    assert "perplexity" in output
    assert (tmp_path / "runs/tuned/sft/artifact/adapter").is_dir()
    (kept,) = (tmp_path / "runs/tuned/sources").iterdir()
    assert "Box 3:" not in kept.read_text(), "the records to compare on are not learned"


@pytest.mark.slow
def test_dpo(model: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"Say hello {n}.", "chosen": "Hello to you.", "rejected": "What now?"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    output = run_script("dpo", model, tmp_path / "pairs.jsonl", cwd=tmp_path)
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)", output)]
    assert accuracies[0] == 0.5, "the policy is the reference"
    assert accuracies[-1] > 0.9


@pytest.mark.slow
def test_grpo_learns_from_the_function(model: Path, tmp_path: Path) -> None:
    questions = [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    output = run_script("grpo", model, tmp_path / "questions.jsonl", cwd=tmp_path)
    assert len(re.findall(r"mean reward [\d.]+", output)) == 4
    run = tmp_path / "runs/short-answers"
    shutil.copytree(run, tmp_path / "runs/other")
    assert mw.Run.open(run).metrics()["grpo"][0]["reward/failures"] == 0
    before = digest(run, "grpo")
    rewards = {"grpo": {"rewards": {"brevity": {"kind": "function", "path": f"{tmp_path}/other.py:same"}}}}
    (tmp_path / "other.py").write_text("def same(sample):\n    return 1.0\n")
    other = mw.run(tmp_path / "runs/other", **rewards)
    assert digest(other.path, "grpo") != before, "another function makes other weights"


def test_cleaning_step_drops_and_changes(tmp_path: Path) -> None:
    texts = ["LOOK AT THIS OFFER NOW!!! BUY IT TODAY, FRIENDS!!!", "The river rose in spring!!! It fell again in May."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = run_script("cleaning_step", tmp_path / "texts.jsonl", cwd=tmp_path)
    assert re.search(r"^no_shouting +2 +1$", output, re.MULTILINE)
    assert [one.text for one in read_kept(tmp_path / "cleaned")] == [texts[1].replace("!!!", "!")]
    (dropped,) = read_dropped(tmp_path / "cleaned")
    assert (dropped.step, dropped.reason) == ("no_shouting", "capitals")


def test_serve_and_query(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    output = run_script("serve_and_query", model, cwd=tmp_path)
    answer, stream = (re.search(rf"^{name}: (.*?)(?=^\w+:)", output, re.M | re.S) for name in ("answer", "stream"))
    assert answer is not None
    assert stream is not None
    assert answer[1] == stream[1], "the same greedy answer, word by word"
    assert "embeddings: [64, 64]" in output or re.search(r"embeddings: \[(\d+), \1\]", output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drift_and_update(model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_records(texts / "old.jsonl", old_records(range(200)))
    write_records(texts / "new.jsonl", new_records(range(1000, 1150)))
    write_records(texts / "old-heldout.jsonl", old_records(range(500, 580)))
    write_records(texts / "new-heldout.jsonl", new_records(range(2000, 2100)))
    for name, records, day in (("requests", old_records(range(5000)), 1), ("later", new_records(range(1000)), 8)):
        lines = [
            {
                "id": f"{name}-{number}",
                "time": 1.8e9 + 86_400 * day + number,
                "session": f"{name}-s{number}",
                "prompt": record["question"],
                "answer": record["answer"],
            }
            for number, record in enumerate(records)
        ]
        (texts / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"sft.num_steps": 20, "sft.learning_rate": 5e-3, "pack.seq_len": 64, "sft.batch_tokens": 512}
    base = mw.finetune(model, texts / "old.jsonl", run_dir=tmp_path / "runs/support", **settings)
    output = run_script("drift_and_update", base.path, texts, *QUICK, cwd=tmp_path)
    assert "prompt_embedding" in output or "prompt_length" in output
    assert "released as runs/update/release" in output
    assert digest(tmp_path / "runs/update", "sft") != digest(base.path, "sft")


TEXT = "{n} is followed by {m}, and 3 times {n} is {t}: a line of text about numbers."
SMALL = {
    "pack.seq_len": 64, "tokenizer.vocab_size": 400, "model.vocab_size": 400, "model.max_seq_len": 64,
    "model.num_layers": 1, "pretrain.batch_tokens": 256, "pretrain.num_steps": 3, "pretrain.eval_every_steps": 0,
    "clean.quality.limits": {}, "data.validation_fraction": 0.0,
    "stages": ["clean", "tokenize", "pack", "pretrain", "report"],
}  # fmt: skip


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package of examples as pip would install it: its modules, and its entry points from pyproject.toml."""
    project = tomllib.loads((EXTENSION / "pyproject.toml").read_text())["project"]
    info = tmp_path_factory.mktemp("site") / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of.items()) for group, of in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXTENSION)
        patch.syspath_prepend(info.parent)
        yield f"{info.parent}:{EXTENSION}"
        for name in [name for name in sys.modules if name.startswith("my_parts")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def plain(extended: str, tmp_path_factory: pytest.TempPathFactory) -> mw.Run:
    """A run without any of the parts."""
    texts = ({"text": "\n".join(TEXT.format(n=n, m=n + 1, t=3 * n) for n in range(k, k + 9))} for k in range(0, 900, 9))
    return mw.run("tiny", texts, run_dir=tmp_path_factory.mktemp("runs") / "plain", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"pretrain.techniques": {"centralization": {"strength": 0.5}}}, ""),
        ({"pretrain.objective": {"smoothed": {"epsilon": 0.2}}}, "share_right"),
    ],
    ids=["technique", "objective"],
)
def test_a_part_changes_the_weights(settings: dict[str, Any], metric: str, plain: mw.Run, tmp_path: Path) -> None:
    shutil.copytree(plain.path, tmp_path / "run")
    changed = mw.run(tmp_path / "run", **settings)
    assert digest(changed.path, "pack") == digest(plain.path, "pack")
    assert digest(changed.path, "pretrain") != digest(plain.path, "pretrain")
    assert any(metric in step for step in changed.metrics()["pretrain"]) or not metric


@pytest.mark.slow
def test_an_augmentation_changes_the_weights(plain: mw.Run, tmp_path: Path) -> None:
    """Rows that are augmented are packed with what it takes to encode them again, so two fractions are compared."""
    runs = []
    for fraction in (0.01, 0.9):
        shutil.copytree(plain.path, folder := tmp_path / f"run-{fraction}")
        settings = {"methods": ["doubled_words"], "settings": {"doubled_words": {"fraction": fraction}}}
        settings["num_workers"] = 0  # a worker is an interpreter that imports PyTorch for two steps
        runs.append(mw.run(folder, augmentation=settings).path)
    assert digest(runs[0], "pack") == digest(runs[1], "pack")
    assert digest(runs[0], "pretrain") != digest(runs[1], "pretrain")


@pytest.mark.slow
def test_a_stage_trains_after_pretraining(extended: str, plain: mw.Run, tmp_path: Path) -> None:
    """In a process of its own: the list of stages is read once."""
    shutil.copytree(plain.path, tmp_path / "run")
    stages = ["clean", "tokenize", "pack", "pretrain", "backward", "report"]
    words = ["run", str(tmp_path / "run"), "--stages", ",".join(stages), "--backward.num_steps", "2"]
    words += ["--backward.batch_tokens", "256", "--backward.eval_every_steps", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{extended}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "modelwright.cli.entry", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = mw.Run.open(tmp_path / "run")
    assert sorted(run.stages) == sorted(stages)
    assert digest(run.path, "pretrain") == digest(plain.path, "pretrain")
    assert (run.path / "backward/artifact/model.safetensors").is_file()
    assert len(run.metrics()["backward"]) >= 2
    assert run.report is not None
    assert "Reversed text" in run.report.read_text()


def test_a_step_of_the_package_drops_documents(extended: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("market\n")
    nouns = ("river", "letter", "market", "garden")
    texts = [{"text": f"Near the {noun} they spoke of what the {noun} was planned to become."} for noun in nouns]
    steps = [{"banned_words": {"words": ["river"], "lists": [str(tmp_path / "words.txt")]}}]
    mw.clean(texts, tmp_path / "cleaned", clean={"steps": steps})
    dropped = {one.detail: one.step for one in read_dropped(tmp_path / "cleaned")}
    assert dropped == {"river": "banned_words", "market": "banned_words"}
    assert len(list(read_kept(tmp_path / "cleaned"))) == 2


def test_a_reward_of_the_package_scores(extended: str) -> None:
    reward = build_reward({"sentences": {"most_words": 2, "weight": 2.0}})
    answers = ["Yes. It is so. No.", "a b c d", ""]
    prompt = [{"role": "user", "content": "?"}]
    scored = reward.score([Sample(prompt=prompt, answer=answer, num_tokens=3) for answer in answers])
    assert [score.value for score in scored] == pytest.approx([2 * 2 / 3, 0.0, 0.0])
    with pytest.raises(ConfigError, match="most_words"):
        build_reward({"sentences": {"most_words": 0}})
