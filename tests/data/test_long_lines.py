"""Files of 200 MB whose text is one line: one clear error or a counted skip, in little memory."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import zstandard

BLOCK = b"one line without an end " * 43_691
NUM_BLOCKS = 200
PEAK_BYTES = 512 * 2**20
"""The command itself takes 130 MiB."""
PEAK_BYTES_OF_LONGEST = 1024 * 2**20
"""With a document of the longest line that is read."""
PROGRAM = """
import sys
from pathlib import Path
from modelwright.cli.main import main

code = main(sys.argv[1:])
print("peak", Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
sys.exit(code)
"""
BEFORE_AND_AFTER = {
    "long.txt": (b"A first paragraph of text that is read.\n", b"\nA last paragraph of text that is read.\n"),
    "long.jsonl": (
        b'{"text": "A first record of text that is read."}\n{"text": "',
        b'"}\n{"text": "A last record of text that is read."}\n',
    ),
    "long.csv": (b"text\nA first row of text that is read.\n", b"\nA last row of text that is read.\n"),
}


def write_long(path: Path, num_blocks: int = NUM_BLOCKS) -> Path:
    """About 1 MiB of one line for each block, between two short texts."""
    before, after = BEFORE_AND_AFTER[path.name.removesuffix(".zst")]

    def write(file: BinaryIO) -> None:
        file.write(before)
        for _ in range(num_blocks):
            file.write(BLOCK)
        file.write(after)

    with open(path, "wb") as file:
        if path.suffix == ".zst":
            with zstandard.ZstdCompressor().stream_writer(file) as compressed:
                write(compressed)  # pyright: ignore[reportArgumentType]
        else:
            write(file)
    return path


def clean(*words: object) -> tuple[subprocess.CompletedProcess[str], int]:
    """The command, and the most bytes of memory that its process had."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "clean", *map(str, words)], capture_output=True, text=True, check=False
    )  # fmt: skip
    peak = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    assert peak, done.stderr
    return done, 1024 * int(peak[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE_AND_AFTER)
def test_one_clear_error(tmp_path: Path, name: str) -> None:
    path = write_long(tmp_path / name)
    done, peak_bytes = clean(path, "--out", tmp_path / "out")
    assert done.returncode == 2
    line = {"long.txt": 2, "long.jsonl": 2, "long.csv": 3}[name]
    problem = f"modelwright: {path}:{line}: the line is longer than 16,777,216 bytes; "
    ways_out = "break it, or raise --data.max_record_bytes, or pass --data.on_bad_record skip"
    assert done.stderr.strip().splitlines()[-1].startswith(f"{problem}{ways_out}")
    assert peak_bytes < PEAK_BYTES


@pytest.mark.slow
def test_a_counted_skip(tmp_path: Path) -> None:
    paths = [write_long(tmp_path / name) for name in (*BEFORE_AND_AFTER, "long.jsonl.zst")]
    assert paths[-1].stat().st_size < 2**20
    done, peak_bytes = clean(*paths, "--out", tmp_path / "out", "--data.on_bad_record", "skip")
    assert done.returncode == 0, done.stderr
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    assert sources["skipped"] == {"line too long": 4}
    assert sources["documents"] == {"prose": 8}, "what stands before and after the line is read"
    entries = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["where"].rpartition("/")[2] for entry in entries] == [
        "long.txt:2", "long.jsonl:2", "long.csv:3", "long.jsonl.zst:2"
    ]  # fmt: skip
    assert peak_bytes < PEAK_BYTES


@pytest.mark.slow
def test_the_longest_line_that_is_read(tmp_path: Path) -> None:
    path = write_long(tmp_path / "long.txt", num_blocks=15)
    done, peak_bytes = clean(path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["quality"]["too long"]["documents"] == 1
    assert peak_bytes < PEAK_BYTES_OF_LONGEST
