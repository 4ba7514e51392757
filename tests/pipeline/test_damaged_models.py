"""A finished model whose files are damaged or gone is refused by name; an earlier one is taken only when asked for."""

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.artifacts import ArtifactError, RunDir, read_manifest, save_yaml, write_artifact
from modelwright.core.config import ModelError
from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import single
from modelwright.pipeline.runner import begin_attempt, run_stages
from modelwright.pipeline.stages.init import INIT, save_model_folder
from modelwright.recipes.load import recipe
from rank_processes import start_process

Command = Callable[..., subprocess.CompletedProcess[str]]


def add_model(run: RunDir, stage: str, seed: int) -> None:
    """A finished training stage: its journal, its entry in run.json, a model of its own."""
    tokenizer = train_tokenizer(["the quick brown fox"] * 3, TokenizerConfig(vocab_size=270))
    model = Decoder(
        ModelConfig(
            vocab_size=270, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
            max_seq_len=128,
        )
    )  # fmt: skip
    model.init_weights(seed)
    folder = run.stage(stage)
    folder.path.mkdir(parents=True)
    with begin_attempt(folder, stage, 1), write_artifact(folder.artifact, kind=stage, digest=stage) as draft:
        save_model_folder(model, tokenizer, draft.path)
    info = run.read_info()
    run.write_info(info | {"stages": info["stages"] | {stage: {}}})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the tiny recipe that has finished pretraining."""
    run = RunDir(tmp_path / "run").create()
    save_yaml(run.config, recipe("tiny"))
    run.write_info({"name": "tiny", "invocations": [], "stages": {}})
    add_model(run, "pretrain", 1)
    return run


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (lambda sft: flip_byte(sft / "artifact/model.safetensors"), "model.safetensors: is damaged"),
    "a truncated file": (
        lambda sft: (sft / "artifact/tokenizer.json").write_text("{"),
        "tokenizer.json: has 1 bytes instead of",
    ),
    "a missing file": (lambda sft: (sft / "artifact/config.json").unlink(), "config.json: is missing"),
    "a missing manifest": (lambda sft: (sft / "artifact/manifest.json").unlink(), "has no manifest.json"),
    "a missing artifact": (lambda sft: shutil.rmtree(sft / "artifact"), "sft/artifact: is missing"),
    "a missing stage": (lambda sft: shutil.rmtree(sft), "sft/artifact: is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["export", "chat", "serve"])
def test_a_damaged_fine_tuned_model_is_refused(run: RunDir, inside: Command, damage: str, name: str) -> None:
    add_model(run, "sft", 2)
    harm, words = DAMAGES[damage]
    harm(run.path / "sft")
    done = inside(name, str(run.path), *(["--to", "hf"] if name == "export" else []))
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert f"modelwright run {run.path}" in done.stderr
    assert "--stage pretrain" in done.stderr
    assert not (run.path / "hf").exists()


def test_an_earlier_model_is_taken_when_asked_for(run: RunDir, inside: Command, tmp_path: Path) -> None:
    add_model(run, "sft", 2)
    flip_byte(run.path / "sft/artifact/model.safetensors")
    done = inside("export", str(run.path), "--to", "hf", str(tmp_path / "hf"), "--stage", "pretrain")
    assert done.returncode == 0, done.stderr
    assert "Model: pretrain of tiny" in done.stderr
    written, made = (folder / "model.safetensors" for folder in (tmp_path / "hf", run.path / "pretrain/artifact"))
    assert written.read_bytes() == made.read_bytes()


def test_the_last_finished_model_is_taken_and_named(
    run: RunDir, inside: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n/exit\n"))
    digest = read_manifest(run.stage("pretrain").artifact).content_digest
    before = inside("chat", str(run.path))
    assert before.returncode == 0, before.stderr
    assert "sft has not finished yet, so this is the model of pretrain" in before.stderr
    assert f"pretrain of tiny ({run.path}/pretrain/artifact, sha256 {digest[:12]})" in before.stdout
    add_model(run, "sft", 2)
    after = inside("chat", str(run.path))
    assert "sft of tiny" in after.stdout
    assert after.stderr == ""
    refused = inside("chat", str(run.path), "--stage", "clean")
    assert (refused.returncode, "choose from pretrain, sft" in refused.stderr) == (2, True)


def test_the_server_says_which_model_it_has(run: RunDir) -> None:
    add_model(run, "sft", 2)
    artifact = run.stage("sft").artifact
    digest = read_manifest(artifact).content_digest
    started = start_process("modelwright.cli.main", "serve", run.path, "--port=0")
    try:
        while started.is_alive and "\n" not in started.output:
            time.sleep(0.02)
        url = started.output.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            listed = json.loads(reply.read())["data"][0]
        started.send_signal(signal.SIGTERM)
        _, said, _ = started.end()
    finally:
        started.process.kill()
    wanted = {"id": "tiny", "stage": "sft", "root": str(artifact), "digest": digest}
    assert {name: listed.get(name) for name in wanted} == wanted
    assert said.splitlines()[1:] == [f"Model: sft of tiny ({artifact}, sha256 {digest[:12]})"]


def test_training_does_not_start_from_a_damaged_artifact(run: RunDir, tmp_path: Path) -> None:
    folder = run.stage("pretrain").artifact
    flip_byte(folder / "model.safetensors")
    stage = INIT.build(replace(recipe("tiny"), init_from=str(folder)), RunDir(tmp_path), ())
    with pytest.raises(ArtifactError, match=r"model\.safetensors: is damaged"):
        run_stages(RunDir(tmp_path / "second").create(), [stage], ranks=single(), progress=SilentProgress())


def test_an_initial_model_whose_tokenizer_has_more_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the quick brown fox"] * 3, TokenizerConfig(vocab_size=270))
    model = Decoder(
        ModelConfig(
            vocab_size=260, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
            max_seq_len=128,
        )
    )  # fmt: skip
    model.init_weights(0)
    save_model_folder(model, tokenizer, tmp_path / "model")
    config = replace(recipe("tiny"), init_from=str(tmp_path / "model"))
    run = RunDir(tmp_path / "run").create()
    with pytest.raises(ModelError, match=r"model: its tokenizer has \d+ tokens, its model only 260"):
        run_stages(run, [INIT.build(config, run, ())], ranks=single(), progress=SilentProgress())
