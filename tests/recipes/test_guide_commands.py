"""Commands and Python of guides, in their order, in one folder with what the pages take for granted: a model, its run,
notes, pairs, requests. `SHOWN` says which lines are only parsed (test_guides.py), and why.
"""

import json
import random
import shlex
import shutil
import signal
import socket
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from continual_update import new_records, old_records
from doc_pages import blocks, commands_of
from finetune_files import write_examples, write_model
from rank_processes import start_process

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/data.md", "docs/augmentation.md", "docs/alignment.md", "docs/drift.md", "docs/planning.md")
SHOWN = {
    "make ": "packages/claims/tests/test_readme.py",
    "--name my-text --data.sources README.md": "the same",
    "prove --list": "the same",
    "run quickstart --dry-run": "the same",
    "--preview 5": "needs WordNet: tests/data/test_augment_golden.py",
    "s3://": "needs a store: tests/pipeline/test_result_store.py, test_rows_from.py",
    "--augmentation.methods random_swap": "tests/recipes/test_page_commands.py",
    "synonym_replacement": "needs WordNet: tests/data/test_augment_golden.py",
    "drift watch": "does not end: packages/continual/tests/drift",
    "--skypilot": "packages/plan/tests/test_skypilot.py",
    "/mnt/runs": "a disk that is not there: tests/cli/test_doctor.py",
}
"""Parts of lines that do not run here, and what does it instead."""
SMALL = (
    "--stages=clean,tokenize,pack,pretrain,sft,report", "--pack.seq_len=128", "--model.max_seq_len=128",
    "--tokenizer.vocab_size=400", "--model.vocab_size=400", "--model.num_layers=1", "--pretrain.num_steps=2",
    "--pretrain.batch_tokens=512", "--sft.num_steps=2", "--sft.batch_tokens=512",
)  # fmt: skip
TRAININGS = ("sft", "reward", "dpo", "kto", "ppo")
FROM_MODEL = (
    "--pack.seq_len=192", "--data.validation_fraction=0.2",
    *(f"--{name}.{key}" for name in TRAININGS for key in ("num_steps=2", "batch_tokens=768")),
    "--rollout.max_completion_length=8",
)  # fmt: skip
WORDS = [a + b + c for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va") for c in ("l", "m", "n")]
PATIENCE_S = 240.0


def sentences(number: int, *, seed: int) -> list[str]:
    dice = random.Random(seed)
    drawn = (dice.sample(WORDS, 6) for _ in range(number))
    return [f"The {a} of the {b} was in {c} when they saw that the {d} and {e} had {f}." for a, b, c, d, e, f in drawn]


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def taken_for_granted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("guides")
    write_model(place / "models" / "mine")
    shutil.copytree(place / "models" / "mine", place / "my-model")
    write_examples(place / "examples.jsonl")
    write_examples(place / "heldout.jsonl", num_records=10)
    asked = [f"{one[:-1]}?" for one in sentences(40, seed=1)]
    good, bad = sentences(40, seed=2), sentences(40, seed=3)
    triples = list(zip(asked, good, bad, strict=True))
    write_lines(place / "pairs.jsonl", [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in triples])
    write_lines(place / "labeled.jsonl", [{"prompt": a, "completion": b, "label": n % 2 == 0} for n, (a, b, _) in
                                          enumerate(triples)])  # fmt: skip
    (place / "pairs.json").write_text(json.dumps([{"question": a, "answer": b} for a, b, _ in triples]))
    for name, seed in (("notes/a.txt", 4), ("notes/b.txt", 5), ("corpus/c.txt", 6)):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("\n\n".join(" ".join(sentences(4, seed=10 * seed + n)) for n in range(40)))
    (place / "more").mkdir()
    lines = "".join(json.dumps({"text": " ".join(sentences(5, seed=900 + n))}) + "\n" for n in range(30))
    (place / "more" / "texts.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    for name, records, day in (("requests", old_records(range(5000)), 1), ("later", new_records(range(1000)), 8)):
        write_lines(place / f"{name}.jsonl", [
            {"id": f"{name}-{n}", "time": 1.8e9 + 86_400 * day + n, "session": f"{name}-{n}",
             "prompt": record["question"], "answer": record["answer"]}
            for n, record in enumerate(records)
        ])  # fmt: skip
    run(["run", "tiny", *SMALL, "--name", "quickstart", "--data.sources", "notes", "pairs.json"], place)
    return place


def run(words: list[str], place: Path, *, code: int = 0) -> None:
    ended, output, errors = start_process("modelwright.cli.main", *words, cwd=place).end()
    assert ended == code, f"{shlex.join(words)}\n{output[-1500:]}{errors[-2500:]}"


def serve(words: list[str], place: Path) -> None:
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = start_process("modelwright.cli.main", *words[: words.index("--port")], "--port", port, cwd=place)
    give_up = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < give_up and server.is_alive:
            with suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/health").close()
                return
            time.sleep(0.1)
        pytest.fail("the server does not answer")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.end()[0] in (0, 143)


def lines(page: str) -> list[str]:
    return [line for line in commands_of(ROOT / page) if not any(part in line for part in SHOWN)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_guide_run(page: str, taken_for_granted: Path, tmp_path: Path) -> None:
    place = tmp_path / "reader"
    shutil.copytree(taken_for_granted, place)
    (place / "runs/NAME").symlink_to("quickstart")
    assert lines(page)
    for line in lines(page):
        program, command, *words = shlex.split(line, comments=True)
        if program != "modelwright":
            assert program == "pip"
        elif command == "run" and "--dry-run" not in words:
            small = FROM_MODEL if "--init-from" in words else SMALL[1:] if "--stages" in words else SMALL
            name = [] if "--name" in words else ["--name", "unnamed"]
            run(["run", words[0].replace("quickstart", "tiny"), *small, *name, *words[1:], "--restart"], place)
        elif command == "serve":
            serve(["serve", *words], place)
        else:
            run([command, *words], place, code=4 if words[:1] == ["check"] else 0)
    for number, block in enumerate(blocks(ROOT / page)):
        if block.language == "python" and page != "README.md":  # which packages/claims/tests/test_readme.py runs
            (place / f"block-{number}.py").write_text(block.text)
            code, output, errors = start_process(place / f"block-{number}.py", cwd=place).end()
            assert code == 0, output[-1500:] + errors[-2500:]


def test_what_is_only_shown_is_on_a_page() -> None:
    text = "\n".join(line for page in PAGES for line in commands_of(ROOT / page))
    assert [part for part in SHOWN if part not in text] == []
