"""Command lines that try every command with small inputs, and the extra that each needs; "" for none."""

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from modelwright.cli.main import DISTRIBUTIONS
from modelwright.recipes.load import recipe

TASK = {"task": "colors", "dataset_path": "json", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "metric_list": []}
PLAIN = ("--clean.format.html", "keep", "--clean.duplicates.near", "false", "--clean.privacy.replace", "none")
"""Cleaning without the steps that need the extra `clean`."""
RELAXED = (
    "--clean.quality.limits.prose.max_top_ngram_fraction", "0.9",
    "--clean.quality.limits.prose.max_record_fraction", "1",
)  # fmt: skip
"""Limits of quality that the text of `write_inputs` stays within."""
SMALL = ("--pack.seq_len", "64", "--model.max_seq_len", "64", "--tokenizer.vocab_size", "400")


def command_lines(folder: Path) -> dict[str, tuple[list[str], str]]:
    """By what is tried: the words, and the extra that they need; "" for none."""
    run, text, examples = str(folder / "run"), str(folder / "text.txt"), str(folder / "examples.jsonl")
    small = [*SMALL, "--pretrain.batch_tokens", "256", "--pretrain.num_steps", "2", "--hardware.num_threads", "1"]
    small += ["--data.sources", text, *RELAXED]
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
        "clean": (["clean", text, "--out", str(folder / "cleaned"), *RELAXED], "clean"),
        "clean less": (["clean", text, "--out", str(folder / "cleaned"), *PLAIN, *RELAXED], ""),
        "clean a page": (
            ["clean", str(folder / "page.html"), "--out", str(folder / "of-page"), *PLAIN, *RELAXED],
            "clean",
        ),
        "clean by Ray": (
            ["clean", text, "--out", str(folder / "by-ray"), "--clean.engine", "ray", *PLAIN, *RELAXED],
            "ray",
        ),
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


def write_inputs(folder: Path) -> None:
    """Writes the files that `command_lines` names."""
    lines = (f"{n} is followed by {n + 1}, and 3 times {n} is {3 * n}: a line of text." for n in range(900))
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "examples.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} and {n}?", "completion": f"{2 * n}."}) + "\n" for n in range(40))
    )
    sentences = (f"In {1900 + n} the river at the town was {3 * n} feet deep, and {n} others." for n in range(40))
    (folder / "page.html").write_text(f"<html><body><p>{' '.join(sentences)}</p></body></html>")
    (folder / "task.yaml").write_text(json.dumps(TASK))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    width = recipe("tiny").model.model_dim
    save_file(
        {"base_model.model.model.norm.weight": np.ones(width, np.float32)},
        folder / "adapter" / "adapter_model.safetensors",
    )


def fault_of(extra: str, exit_code: int, errors: str) -> str:
    """Returns what is wrong with how a command has ended without extras: it works, or one line names its extra."""
    named = re.findall(r"pip install 'modelwright\[([\w,-]+)\]'", errors)
    is_told = exit_code == 2 and len(errors.splitlines()) == 1 and named == [extra]
    is_right = "Traceback" not in errors and (is_told if extra else exit_code == 0)
    return "" if is_right else f"({extra or 'no extra'}): {exit_code} {errors[-600:]}"
