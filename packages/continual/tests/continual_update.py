"""What tests of updates share: a small model that knows one task, texts of a second one, a benchmark of both."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from chat_templates import HERMES
from finetune_files import write_model

KINDS = {
    "animal": ("otter", "heron", "badger", "lizard", "weasel", "falcon"),
    "tool": ("hammer", "chisel", "pliers", "wrench", "mallet", "sickle"),
    "fruit": ("cherry", "quince", "papaya", "lychee", "tomato", "orange"),
}
PLACES = ("shed", "garden", "kitchen", "harbor", "market", "library", "cellar", "tower")
COLORS = ("red", "green", "blue", "white", "black")
QUICK = (
    "--sft.learning_rate=5e-3", "--sft.num_steps=24", "--sft.eval_every_steps=12", "--sft.checkpoint_every_steps=5",
    "--pack.seq_len=64", "--sft.batch_tokens=512", "--average.shares=[0.0, 0.2, 0.5]",
    "--training.precision.policy=fp32", "--training.precision.fp32_matmul=default", "--serve.int8.backend=int_mm",
    "--hardware.num_threads=1", "--hardware.device=cpu", "--clean.num_workers=1",
)  # fmt: skip

Record = dict[str, str]


def old_records(numbers: Sequence[int]) -> list[Record]:
    """What the first model was trained on: colors of boxes."""
    return [
        {"question": f"Box {number} of the {PLACES[number % 8]}?", "answer": f"Its color is {COLORS[number % 5]}."}
        for number in numbers
    ]


def new_records(numbers: Sequence[int]) -> list[Record]:
    """The second task: what kind of thing a word is. Every question has another name and place."""
    things = [(kind, word) for kind, words in KINDS.items() for word in words]
    records = []
    for number in numbers:
        kind, word = things[number % len(things)]
        records.append({"question": f"Entry {number}: {word}, {PLACES[number % 8]}?", "answer": f"Kind: {kind}"})
    return records


def flipped(records: Sequence[Record]) -> list[Record]:
    """Each answer exchanged by the next kind's."""
    after = dict(zip(KINDS, [*list(KINDS)[1:], next(iter(KINDS))], strict=True))
    return [{**one, "answer": f"Kind: {after[one['answer'].removeprefix('Kind: ')]}"} for one in records]


def garbage(number: int, *, seed: int = 5) -> list[Record]:
    """Characters at random, in lines that look like records."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"

    def word() -> str:
        return "".join(dice.choices(letters, k=dice.randint(3, 9)))

    return [
        {"question": " ".join(word() for _ in range(4)), "answer": " ".join(word() for _ in range(3))}
        for _ in range(number)
    ]


def write_records(path: Path, *parts: Sequence[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in itertools.chain(*parts)), encoding="utf-8")
    return path


def write_world(folder: Path) -> Path:
    """`model`, a folder with random weights, and texts of both tasks: `old.jsonl`, `old-heldout.jsonl`, and so on."""
    write_model(folder / "model", template=HERMES)
    write_records(folder / "old.jsonl", old_records(range(200)))
    write_records(folder / "new.jsonl", new_records(range(1000, 1150)))
    write_records(folder / "old-heldout.jsonl", old_records(range(500, 580)))
    write_records(folder / "new-heldout.jsonl", new_records(range(2000, 2100)))
    return folder
