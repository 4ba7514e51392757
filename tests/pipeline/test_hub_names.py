"""Fine-tuning a model that a hub has on a data set that it has, and giving it the result, in processes of a user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune_files import write_examples, write_model
from local_hub import running_hub


@pytest.mark.slow
def test_from_a_hub_to_a_hub(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with running_hub() as hub:
        hub.repositories["models/owner/small"] = {one.name: one.read_bytes() for one in model.iterdir()}
        examples = write_examples(tmp_path / "examples.jsonl")
        hub.repositories["datasets/owner/boxes"] = {"data/train.jsonl": examples.read_bytes(), "README.md": b"# Boxes"}
        environment = {**os.environ, **hub.environment(str(tmp_path / "home"))}

        def run(*words: str, given: str = "") -> str:
            command = [sys.executable, "-m", "modelwright.cli.main", *words]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=tmp_path, env=environment, input=given, timeout=280
            )
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
            return done.stdout

        run("finetune", "owner/small", "hf://datasets/owner/boxes", "--sft.num_steps", "2")
        (folder,) = (tmp_path / "runs").iterdir()
        assert folder.name == "small-boxes"
        assert run("export", str(folder), "--to", "hub", "owner/tuned").strip() == "owner/tuned"
        files = hub.repositories["models/owner/tuned"]
        assert files["model.safetensors"] == (folder / "sft/artifact/model.safetensors").read_bytes()
        card = files["README.md"].decode()
        assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "owner/small"
        assert str(tmp_path) not in card
        assert "owner/tuned" in hub.private
        assert "Model: " in run("chat", "owner/tuned", "--temperature", "0", given="Box 1: which color?\n/exit\n")
