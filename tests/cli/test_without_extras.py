"""After `pip install modelwright` every command works, or ends with one line that names the extra that it needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from modelwright.cli.main import COMMANDS, DISTRIBUTIONS
from modelwright.recipes.load import recipe

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TASK = {"task": "colors", "dataset_path": "json", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "metric_list": []}
PLAIN = ("--clean.format.html", "keep", "--clean.duplicates.near", "false", "--clean.privacy.replace", "none")
"""Cleaning without the steps that need the extra `clean`."""
SMALL = ("--pack.seq_len", "64", "--model.max_seq_len", "64", "--tokenizer.vocab_size", "400")


def command_lines(folder: Path) -> dict[str, tuple[list[str], str]]:
    """By what is tried: the words, and the extra that they need; "" for none."""
    run, text, examples = str(folder / "run"), str(folder / "text.txt"), str(folder / "examples.jsonl")
    small = [*SMALL, "--pretrain.batch_tokens", "256", "--pretrain.num_steps", "2", "--hardware.num_threads", "1"]
    small += ["--data.sources", text, "--clean.quality.limits.prose.max_top_ngram_fraction", "0.9"]
    small += ["--clean.quality.limits.prose.max_record_fraction", "1"]
    stages = ["--stages", "clean,tokenize,pack,pretrain,report"]
    export = {
        form: (["export", run, "--to", form, str(folder / f"model.{form}")], "" if form == "hf" else form)
        for form in ("hf", "gguf", "onnx", "openvino")
    }
    return {
        "run": (["run", "tiny", "--run-dir", run, *small, *stages], ""),
        "run all": (["run", "quickstart", "--run-dir", str(folder / "all")], "clean,serve"),
        "run on images": (["run", "vision", "--run-dir", str(folder / "images"), *PLAIN], "images"),
        "finetune": (["finetune", run, examples, "--dry-run", "--run-dir", str(folder / "tuned")], ""),
        "compare": (["compare", run, run, examples, "--num-records", "2", "--max-new-tokens", "2"], ""),
        "launch": (["launch", "run", "tiny", "--run-dir", run, *small, *stages], ""),
        "evaluate": (["evaluate", run, "--tasks", str(folder / "task.yaml")], "eval"),
        "clean": (["clean", text, "--out", str(folder / "cleaned")], "clean"),
        "clean less": (["clean", text, "--out", str(folder / "cleaned"), *PLAIN], ""),
        "clean a page": (["clean", str(folder / "page.html"), "--out", str(folder / "of-page"), *PLAIN], "clean"),
        "clean by Ray": (["clean", text, "--out", str(folder / "by-ray"), "--clean.engine", "ray", *PLAIN], "ray"),
        "clean a store": (["clean", "s3://bucket/text.txt", "--out", str(folder / "of-store"), *PLAIN], "remote"),
        "augment": (["augment", text, str(folder / "changed.jsonl"), "--augment.methods", "keyboard_typos"], ""),
        "recipes": (["recipes"], ""),
        "config": (["config", "tiny"], ""),
        "explain": (["explain", "pretrain.num_steps"], ""),
        "doctor": (["doctor", "--seconds", "0.1", "--folder", str(folder)], ""),
        "lr-find": (["lr-find", run, "--steps", "20", "--out", str(folder / "rates")], ""),
        "serve": (["serve", run, "--port", "0"], "serve"),
        "requests": (
            ["requests", "export", "sqlite:///" + str(folder / "log.db"), str(folder / "log.jsonl")],
            "requests-log",
        ),
        "chat": (["chat", run], ""),
        **export,
        "show": (["show", run, examples, "--rows", "1"], ""),
        "merge": (["merge", str(folder / "model.hf"), str(folder / "adapter"), str(folder / "merged")], ""),
        "report": (["report", run], ""),
        "completion": (["completion", "bash"], "completion"),
        **{name: ([name], extra) for name, (_, extra) in DISTRIBUTIONS.items()},
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_command_works_or_names_its_extra(tmp_path: Path) -> None:
    tried = command_lines(tmp_path)
    assert {words[0] for words, _ in tried.values()} == {*COMMANDS, *DISTRIBUTIONS}, "what help lists"
    lines = (f"{n} is followed by {n + 1}, and 3 times {n} is {3 * n}: a line of text." for n in range(900))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "examples.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} and {n}?", "completion": f"{2 * n}."}) + "\n" for n in range(40))
    )
    (tmp_path / "page.html").write_text("<html><body><p>A line of text.</p></body></html>")
    (tmp_path / "task.yaml").write_text(json.dumps(TASK))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    width = recipe("tiny").model.model_dim
    save_file(
        {"base_model.model.model.norm.weight": np.ones(width, np.float32)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    (tmp_path / "words.json").write_text(json.dumps([words for words, _ in tried.values()]))
    command = [sys.executable, str(ROOT / "tests/without_extras.py"), str(tmp_path / "words.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    problems = []
    for (name, (_, extra)), (code, errors) in zip(tried.items(), json.loads(ended.stdout), strict=True):
        named = re.findall(r"pip install 'modelwright\[([\w,-]+)\]'", errors)
        told = code == 2 and len(errors.splitlines()) == 1 and named == [extra] and {*extra.split(",")} <= {*EXTRAS}
        if "Traceback" in errors or not (told if extra else code == 0):
            problems.append(f"{name} ({extra or 'no extra'}): {code} {errors[-600:]}")
    assert not problems, "\n\n".join(problems)
    assert not list((tmp_path / "all").glob("*/")), "a run that is refused has not begun"
