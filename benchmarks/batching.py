"""Padding and speed of four ways to make batches of short texts: rows padded to a fixed length, batches by a
token budget with length buckets, packed rows, and chunks of long texts in packed rows.

    python benchmarks/batching.py [--steps 40] [--rounds 3] [--batch-tokens 8192] [--width 256]

The texts are the docstrings of the standard library: most are short, a few are long. The runs alternate; a rate is the
median over the steps after the first ten, and the table has the median of the rounds. Real tokens are those without
padding. The share of padding is counted over the batches that were trained on.
"""

import argparse
import ast
import json
import os
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from modelwright.core.config import load_yaml
from modelwright.data.rows.loader import PackedRows, build_loader
from modelwright.pipeline.run_config import parse_run
from modelwright.train.config import TrainConfig
from quickstart_runs import pretrain, run

WARMUP_STEPS = 10
MODES: Mapping[str, Sequence[str]] = {
    "padded to 512": ("--pack.mode", "one_per_row"),
    "length buckets": ("--pack.mode", "length_buckets"),
    "packed": ("--pack.mode", "best_fit"),
    "packed, chunks": ("--pack.mode", "best_fit", "--pack.long_documents", "chunk"),
}


def docstrings() -> Iterator[str]:
    """All docstrings of the standard library with at least ten words."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        yield from (text for node in nodes if len((text := ast.get_docstring(node) or "").split()) >= 10)


def padding_share(folder: Path, num_steps: int) -> float:
    """The share of padding in the first batches of a run."""
    config = parse_run({**load_yaml(folder / "config.yaml"), "stages": ["clean", "tokenize", "pack", "pretrain"]})
    training: TrainConfig = config.section("pretrain")
    rows = PackedRows(folder / "pack/artifact/pretrain/train")
    loader = build_loader(
        rows,
        training.batching,
        batch_rows=training.batch_rows(rows.seq_len, num_copies=1),
        by_tokens=config.section("pack").mode == "length_buckets",
        seed=config.seed,
        num_steps_of=training.resolve_num_steps,
        row_losses=lambda: np.zeros(0, np.float32),
    )
    shapes = [
        (batch.segments_BT.numel(), int((batch.segments_BT < 0).sum())) for batch in map(loader.batch, range(num_steps))
    ]
    return sum(padding for _, padding in shapes) / sum(total for total, _ in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    given = parser.parse_args()
    threads = os.cpu_count() or 1
    shape = ["--model.model_dim", str(given.width), "--model.ffn_dim", str(2 * given.width)]
    length = ["--pretrain.num_steps", str(given.steps), "--pretrain.batch_tokens", str(given.batch_tokens)]
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place) / "docstrings.jsonl"
        texts.write_text(
            "\n".join(json.dumps({"text": text}) for text in dict.fromkeys(docstrings())), encoding="utf-8"
        )
        folders, padding = {}, {}
        for number, (name, settings) in enumerate(MODES.items()):
            folders[name] = Path(place) / f"prepared-{number}"
            own = ["--run-dir", str(folders[name]), "--data.sources", str(texts), *settings, *shape, *length]
            run("quickstart", *own, "--stages", "clean,tokenize,pack", threads=threads)
            padding[name] = padding_share(folders[name], given.steps)
        rates: dict[str, list[float]] = {name: [] for name in MODES}
        for _ in range(given.rounds):
            for name, folder in folders.items():
                records = pretrain(folder, Path(place) / "run", ["--pretrain.eval_every_steps", "0"], threads=threads)
                steps = [one["tokens_per_s"] for one in records if "tokens_per_s" in one][WARMUP_STEPS:]
                rates[name].append(statistics.median(steps))
    first = statistics.median(rates[next(iter(MODES))])
    print("| batches | padding | real tokens per second | relative |\n| --- | --- | --- | --- |")
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"| {name} | {padding[name]:.1%} | {rate:,.0f} | {rate / first:.2f} |")


if __name__ == "__main__":
    main()
