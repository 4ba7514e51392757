"""The trainers of the peers benchmark do the same work in both formats, gradient clipping included."""

import importlib
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelwright.data.rows.pack import PackConfig, pack
from modelwright.model.hf import load_model, save_model
from tiny_decoder import make_decoder

ROOT = Path(__file__).parents[3]
SEQ_LEN, NUM_STEPS = 16, 3
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3}
"""Largest change of a weight after `NUM_STEPS` updates of at most the learning rate, 1e-3, each."""
NO_GRADIENT = 1e-12
"""A clipping norm so far below AdamW's epsilon that an update is nothing but weight decay."""

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Bench:
    """The benchmark's modules, and a job whose batches are on disk."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def module(self, name: str) -> Any:
        return importlib.import_module(f"trainers.{name}")

    def task(self, compute: str) -> Any:
        return self.module("task").Task(
            folder=self.folder, compute=compute, num_steps=NUM_STEPS, warmup_steps=1, batch_rows=2, seq_len=SEQ_LEN,
            threads=1, device="cpu",
        )  # fmt: skip

    def weights(self, name: str, compute: str, clip_norm: float = 1.0) -> dict[str, Tensor]:
        """The weights after training with one of the trainers. nanoGPT is not compiled, and gets the job's rows,
        each of which is a document, instead of its crops.
        """
        trainer = self.module(name)
        self.monkeypatch.setattr(trainer, "CLIP_NORM", clip_norm)
        if name == "nanogpt":
            self.monkeypatch.setattr(torch, "compile", lambda model: model)
            self.monkeypatch.setattr(
                trainer,
                "crops",
                lambda task: zip(*(task.batches()[n] for n in ("input_ids", "shift_labels")), strict=True),
            )
        out = self.folder / f"{name}-{compute}-{clip_norm}"
        out.mkdir()
        trained = trainer.run(self.task(compute), out)
        assert len(trained.clock.ends) == NUM_STEPS
        return load_model(trained.weights).state_dict()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rows = torch.randint(1, 96, (40, SEQ_LEN), generator=torch.Generator().manual_seed(0)).tolist()
    pack(((row, None) for row in rows), tmp_path / "shards", PackConfig(seq_len=SEQ_LEN), vocab_size=96, eos_id=0)
    save_model(make_decoder(), tmp_path / "model", eos_id=0)
    bench = Bench(tmp_path, monkeypatch)
    bench.module("own").write_batches(bench.task("fp32"))
    yield bench
    for name in [name for name in sys.modules if name.split(".")[0] == "trainers"]:
        del sys.modules[name]


def need(name: str) -> None:
    if name == "lightning_trainer":
        pytest.importorskip("lightning")


@pytest.mark.parametrize("name", ["nanogpt", "hf_trainer", "lightning_trainer"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_peers_train_to_the_same_weights(bench: Bench, name: str, compute: str) -> None:
    need(name)
    ours, theirs = bench.weights("own", compute), bench.weights(name, compute)
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        assert torch.allclose(weight, theirs[key], rtol=0, atol=TOLERANCES[compute]), key


@pytest.mark.parametrize("name", ["own", "nanogpt", "hf_trainer", "lightning_trainer"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_peer_clips_gradients(bench: Bench, name: str, compute: str) -> None:
    """Norms are free of weight decay, so only gradients can move them."""
    need(name)
    norms = {key: weight for key, weight in make_decoder().state_dict().items() if weight.dim() == 1}
    assert norms
    clipped, free = bench.weights(name, compute, NO_GRADIENT), bench.weights(name, compute)
    for key, weight in norms.items():
        assert (clipped[key] - weight).abs().max() < 1e-6, key
        assert (free[key] - weight).abs().max() > 1e-4, key


@pytest.mark.parametrize("tied", [True, False])
def test_losses_of_the_first_batch_are_the_same(bench: Bench, tied: bool) -> None:
    """Documents that end within a row: attention has the same mask, though nanoGPT's crops have none."""
    documents = [list(range(1, length)) for length in (6, 12, 4, 16, 9, 7, 3, 14) * 4]
    config = PackConfig(seq_len=SEQ_LEN)
    for path in (bench.folder / "shards", bench.folder / "model"):
        shutil.rmtree(path)
    pack(((ids, None) for ids in documents), bench.folder / "shards", config, vocab_size=96, eos_id=0)
    save_model(make_decoder(tie_embeddings=tied), bench.folder / "model", eos_id=0)
    task, own, nanogpt = bench.task("fp32"), bench.module("own"), bench.module("nanogpt")
    own.write_batches(task)
    assert (task.batches()["position_ids"][0].diff() < 0).any(), "no row has several documents"
    bench.monkeypatch.setattr(torch, "compile", lambda model: model)
    losses = [trainer.run(task, bench.folder / trainer.__name__).first_loss for trainer in (own, nanogpt)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    crops = list(nanogpt.crops(task))
    assert len(crops) == NUM_STEPS
    stream = task.batches()["input_ids"].flatten().unfold(0, SEQ_LEN + 1, 1)
    for inputs, labels in crops:
        assert inputs.shape == labels.shape == (2, SEQ_LEN)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        for row in torch.cat([inputs, labels[:, -1:]], dim=1):
            assert (stream == row).all(dim=1).any()


@pytest.mark.slow
def test_nanogpt_compiled_trains_on_its_crops(bench: Bench) -> None:
    trainer, task = bench.module("nanogpt"), bench.task("fp32")
    trained = trainer.run(task, bench.folder / "crops")
    assert len(trained.clock.ends) == NUM_STEPS
    before, after = (load_model(folder).state_dict() for folder in (bench.folder / "model", trained.weights))
    assert all(not torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.slow
def test_the_compiled_trainer_trains_to_the_same_weights(bench: Bench) -> None:
    trained = bench.module("hf_trainer_compiled").run(bench.task("fp32"), bench.folder / "compiled")
    ours, theirs = bench.weights("own", "fp32"), load_model(trained.weights).state_dict()
    for key, weight in ours.items():
        assert torch.allclose(weight, theirs[key], rtol=0, atol=TOLERANCES["fp32"]), key


def test_lightning_clips_beside_a_fused_optimizer_without_its_own_check(bench: Bench) -> None:
    """The choice itself, with a stand-in for the package: a fused AdamW, and clipping by the norm of all gradients."""
    package = types.ModuleType("lightning")
    package.LightningModule = nn.Module  # type: ignore[attr-defined]
    bench.monkeypatch.setitem(sys.modules, "lightning", package)
    job = bench.module("lightning_trainer").Job(nn.Linear(4, 4), clock=None)
    optimizer = job.configure_optimizers()
    assert optimizer.defaults["fused"]
    job.model(torch.ones(2, 4)).square().sum().mul(1000).backward()
    job.configure_gradient_clipping(optimizer, 1.0, None)
    norm = torch.cat([parameter.grad.flatten() for parameter in job.parameters()]).norm()
    assert norm.item() == pytest.approx(1.0, rel=1e-4)
