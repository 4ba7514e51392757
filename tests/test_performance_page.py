"""The page of speed and memory next to others: which records it reads, and what it says of them."""

import json
import re
from pathlib import Path
from typing import Any

import performance

AROUND = {
    "versions": {"torch": "2.13.0", "transformers": "5.0", "lightning": "2.0"},
    "commit": "0123456789ab", "load_at_start": [0.1, 0.2, 0.3],
}  # fmt: skip

MODEL = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 100, "intermediate_size": 200, "num_hidden_layers": 10,
    "num_attention_heads": 10, "tie_word_embeddings": True,
}  # fmt: skip
"""1.1 million parameters: 0.1 in the embedding, 0.04 + 0.06 in each layer."""


def write(folder: Path, name: str, record: dict[str, Any], *, date: str, instruction_set: str = "AVX512") -> None:
    machine = {"processor": "Made", "cores": 2, "instruction_set": instruction_set}
    (folder / f"{name}.json").write_text(json.dumps(AROUND | {"machine": machine, "date": date} | record))


def trainers(own: list[float], rival: list[float]) -> dict[str, Any]:
    runs = {"Modelwright": own, "Hugging Face Trainer": rival}
    return {
        "task": {"compute": "fp32"},
        "model": MODEL,
        "runs": {name: [{"tokens_per_s": speed} for speed in speeds] for name, speeds in runs.items()},
        "summary": {name: {"peak_bytes": len(name) * 2**20} for name in runs},
        "wall_s": 120.0,
    }


def row(page: str, *words: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith("|") and all(word in line for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_of_the_newest_record_of_each_instruction_set(tmp_path: Path) -> None:
    write(tmp_path, "peers-fp32-old", trainers([9000.0], [1.0]), date="2026-01-01")
    write(tmp_path, "peers-fp32-new", trainers([300.0, 100.0, 200.0], [50.0, 100.0, 150.0]), date="2026-02-01")
    write(tmp_path, "peers-fp32-avx2", trainers([60.0], [120.0]), date="2026-01-15", instruction_set="AVX2")
    page = performance.page(tmp_path)
    cells = row(page, "pretraining, FP32, 1.1M parameters", "Hugging Face")
    assert cells[1:5] == ["Hugging Face Trainer 5.0", "200 (100 to 300)", "100 (50 to 150)", "**2.00**"]
    assert cells[5:] == ["60 (one run)", "120 (one run)", "**0.50**", "11 against 20"]
    assert "peers-fp32-old" not in page
    assert "[peers-fp32-avx2](../benchmarks/results/peers-fp32-avx2.json)" in page


def test_engines_are_compared_with_the_fastest_one_by_pairs_of_runs(tmp_path: Path) -> None:
    samples = {
        "decode, 1 stream, Modelwright, INT8": [100.0, 300.0],
        "decode, 1 stream, slow, 8 bits": [90.0, 90.0],
        "decode, 1 stream, quick, 8 bits": [200.0, 200.0],
        "decode, 1 stream, four, 4 bits": [900.0, 900.0],
    }
    conditions = {"version of quick, 8 bits": "7"}
    write(tmp_path, "int8-x", {"samples": samples, "conditions": conditions}, date="2026-01-01")
    page = performance.page(tmp_path)
    assert row(page, "INT8, decode, 1 stream")[1:5] == ["quick 7", "200 (100 to 300)", "200 (200 to 200)", "**1.00**"]
    assert row(page, "INT8, decode, 1 stream")[5] == "not measured"
    assert "four" not in page  # there is no INT4 of ours in this record


def test_a_rival_that_went_on_with_avx512_is_marked_and_where_another_was_faster_that_is_said(tmp_path: Path) -> None:
    def engines(quick: float) -> dict[str, Any]:
        own = {"decode, 1 stream, Modelwright, INT8": [100.0]}
        return {
            "samples": own | {"decode, 1 stream, a, 8 bits": [50.0], "decode, 1 stream, b, 8 bits": [quick]},
            "conditions": {},
        }

    write(tmp_path, "int8-avx2", engines(90.0), date="2026-01-01", instruction_set="AVX2")
    assert row(performance.page(tmp_path), "INT8", "| b |")[5:8] == ["100 (one run)", "90 (one run)", "**1.11**"]
    write(tmp_path, "int8-avx512", engines(10.0), date="2026-01-01")
    page = performance.page(tmp_path)
    assert row(page, "INT8", "| b |")[2:8] == [
        "another rival was faster", "", "", "100 (one run)", "90 (one run; used AVX-512)", "**1.11**",
    ]  # fmt: skip
    assert row(page, "INT8", "| a |")[5] == "another rival was faster"


def test_cleaning_has_the_median_of_its_runs(tmp_path: Path) -> None:
    side = {"recall": 1.0, "precision": 0.5, "documents_per_cpu_s": 20.0}
    sides = {"modelwright": side | {"runs": [10.0, 20.0, 40.0]}, "datatrove": side | {"documents_per_cpu_s": 5.0}}
    record = {"tasks": {"quality": sides}, "peers": {"datatrove": "1.2"}}
    write(tmp_path, "cleaning_peers-x", record, date="2026-01-01")
    cells = row(performance.page(tmp_path), "cleaning, quality")
    assert cells[1] == "datatrove 1.2"
    assert cells[2].startswith("20 (10 to 40; recall 1.00")
    assert cells[3:5] == ["5 (one run; recall 1.00, precision 0.50)", "**4.00**"]


def test_a_task_that_became_slower_or_larger_than_at_an_earlier_commit_is_named(tmp_path: Path) -> None:
    same = [100.0, 101.0, 99.0]
    slow, large = [80.0, 81.0, 82.0], [120.0, 121.0, 122.0]

    def task(speed: list[float], peak: list[float]) -> dict[str, Any]:
        return {"speed": {"before": same, "now": speed}, "peak_bytes": {"before": same, "now": peak}}

    tasks = {"slow": task(slow, same), "large": task(large, large), "alike": task(same, same)}
    write(tmp_path, "versus-01234567-x", {"commit_before": "f" * 40, "samples": tasks}, date="2026-01-01")
    lines = {line.split(" ")[0]: line for line in performance.page(tmp_path).splitlines()}
    assert lines["slow"].endswith("slower")
    assert "0.81" in lines["slow"]
    assert lines["large"].endswith("larger")
    assert "slower" not in lines["large"]
    assert not lines["alike"].endswith(("slower", "larger"))


def test_a_quick_record_does_not_count_and_minutes_are_those_of_the_records(tmp_path: Path) -> None:
    write(tmp_path, "peers-fp32-quick", trainers([1.0], [1.0]) | {"quick": True}, date="2026-03-01")
    assert "pretraining" not in performance.page(tmp_path)
    write(tmp_path, "peers-fp32-new", trainers([1.0], [1.0]), date="2026-02-01")
    assert "about 2 minutes, and 5 parts" in performance.minutes(tmp_path)


def test_published_records_give_a_row_each_with_both_sides() -> None:
    page = performance.page()
    table = [line for line in page.split("## Records")[0].splitlines() if line.startswith("| ")][2:]
    assert len(table) > 20
    assert all(re.search(r"\*\*[\d.]+\*\*", line) for line in table)
    assert all(f"/{part}-" in page for part in performance.PARTS)
