"""Runs that pages show are run: with the small recipe in place of the quickstart, a few steps, and rows that one run
has prepared for all. `SHOWN` names those that are only parsed (test_guides.py) and why.
"""

import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from doc_pages import commands_of
from rank_processes import start_process

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *sorted((DOCS / "techniques").glob("*.md")),
    *(DOCS / f"guides/{name}.md" for name in ("smaller", "formats", "processes")),
]
SHOWN = {
    "docs/techniques/contrastive.md": "images: tests/pipeline/test_align_stage.py runs the stage",
    "docs/techniques/mixup.md": "images: tests/pipeline/test_vision_stage.py runs the stage",
    "docs/techniques/grpo.md": "examples/python/grpo.py runs the stage",
    "runs/from-large": "the large model of the page does not exist; the run before it is the same without it",
    "launch": "two hosts: tests/pipeline/test_launch.py",
    "lr-find": "tests/pipeline/test_lr_find.py",
    "plan": "packages/plan/tests",
    "search": "packages/search/tests",
}
"""Parts of a command, or its page, and why it does not run here."""
SMALL = (
    "--pack.seq_len=64", "--model.max_seq_len=64", "--model.num_layers=4", "--model.model_dim=32",
    "--model.num_heads=2", "--model.num_kv_heads=2", "--model.ffn_dim=384", "--tokenizer.vocab_size=400",
    "--model.vocab_size=400", "--pretrain.num_steps=2", "--pretrain.batch_tokens=512", "--sft.num_steps=2",
    "--sft.batch_tokens=512", "--sft.gradient_accumulation_steps=1", "--data.validation_fraction=0.1",
    "--evaluate.max_bytes_per_domain=500", "--evaluate.multiple_choice.num_questions=2",
    "--clean.num_workers=1", "--pretrain.checkpoint_every_steps=20",
)  # fmt: skip
PREPARED = ("clean", "tokenize", "pack")
AFTER = ("sft", "student", "distill", "qat", "dpo", "rollout", "serve", "stages", "name", "run-dir")
"""First words of options that change nothing of the pretraining, which such a run takes, too. Not those of other
groups, even if the artifact stayed the same: a run with `--cache.enabled true` proves something only if it trains.
"""
WORDS = [a + b + c for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va") for c in ("l", "m", "n")]


def runs() -> list[tuple[str, str]]:
    """The page and the words of each run; what several pages show under different names is run once."""
    found, seen = [], set()
    for page in PAGES:
        name = page.relative_to(DOCS.parent).as_posix()
        for line in commands_of(page):
            words = shlex.split(line, comments=True)
            is_shown = any(part == name or part in words for part in SHOWN)
            unnamed = [word for at, word in enumerate(words) if not {word, words[at - 1]} & {"--name", "--run-dir"}]
            if "modelwright" in words and not is_shown and tuple(unnamed) not in seen:
                seen.add(tuple(unnamed))
                found.append((page.stem, shlex.join(words)))
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose, code, questions and pairs of answers, and a run whose rows all others take."""
    place, dice = tmp_path_factory.mktemp("pages"), random.Random(3)
    (text := place / "text").mkdir()

    def sentence(length: int = 9) -> str:
        return " ".join(dice.sample(WORDS, length)).capitalize() + "."

    for number in range(12):
        prose = "\n\n".join(" ".join(sentence() for _ in range(4)) for _ in range(3))
        (text / f"prose-{number}.txt").write_text(prose)
        lines = [f"def {dice.choice(WORDS)}_{i}(part):\n    return part + {i * number}\n" for i in range(12)]
        (text / f"code-{number}.py").write_text("\n".join(lines))
    pairs = [{"question": f"{sentence()[:-1]}?", "answer": sentence()} for _ in range(60)]
    pairs += [{"prompt": f"{sentence()[:-1]}?", "chosen": sentence(), "rejected": sentence()} for _ in range(60)]
    (text / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run_small(["--name", "rows", "--stages", ",".join([*PREPARED, "pretrain"])], place, {})
    return place


def run_small(words: list[str], place: Path, environment: dict[str, str]) -> None:
    line = ["run", "tiny", *SMALL, "--data.sources", "text", *words]
    if "--augmentation.methods" in words:
        # A process of the tests' own may start no workers; tests/train/test_augmented_run.py has them.
        line.append("--augmentation.num_workers=0")
    code, output, errors = start_process("modelwright.cli.main", *line, environment=environment, cwd=place).end()
    assert code == 0, f"{shlex.join(words)}\n{output[-1500:]}{errors[-2500:]}"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), runs(), ids=lambda one: one[:60])
def test_a_run_of_a_page_runs(page: str, line: str, prepared: Path) -> None:
    first, _, rest = line.partition("modelwright ")
    environment = dict(word.split("=") for word in first.split())
    command, recipe, *words = shlex.split(rest)
    assert (command, recipe) == ("run", "quickstart")
    for place, word in enumerate(words):
        if word.endswith((".num_steps", ".batch_tokens")):
            words[place + 1] = "2" if word.endswith(".num_steps") else "512"
        elif word == "--qat.start_step":  # the page's is behind the two steps
            words[place + 1] = "1"
    given = {word.partition("=")[0] for word in words}
    name = words[words.index("--run-dir" if "--run-dir" in given else "--name") + 1]
    folder = Path(name) if "--run-dir" in given else Path("runs") / name
    groups = {word[2:].partition(".")[0] for word in given if word.startswith("--")}
    if "--stages" not in given:
        # Fine-tuning does not know how the weights were pretrained.
        trainings = "pretrain" if groups <= {"name", "run-dir", "pretrain"} and not environment else "pretrain,sft"
        words += ["--stages", f"clean,tokenize,pack,{trainings},report"]
    if not any(word.startswith(("--pack", "--tokenizer", "--augmentation")) for word in given):
        is_later = groups <= {*AFTER} and not environment
        for stage in [*PREPARED, *(["pretrain"] if is_later else [])]:
            if not (prepared / folder / stage).exists():
                shutil.copytree(prepared / "runs/rows" / stage, prepared / folder / stage)
    run_small(words, prepared, environment)
    config = yaml.safe_load((prepared / folder / "config.yaml").read_text())
    for stage in config["stages"]:
        assert (prepared / folder / stage).is_dir()
    assert (prepared / folder / "report.html").is_file() or "report" not in config["stages"]
    shutil.rmtree(prepared / folder)


def test_what_is_only_shown_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = {page.relative_to(DOCS.parent).as_posix() for page in PAGES}
    assert [part for part in SHOWN if part not in names and part not in text] == []
    assert len(runs()) > 40
