"""Checkpoints: whole or absent, the last and the best kept, damage answered by the one before, one clear error."""

import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from late_stream import LateDevice
from modelwright.core.artifacts import ArtifactError, StorageError
from modelwright.core.config import Stopped
from modelwright.core.progress import SilentProgress
from modelwright.train.checkpoint import writer
from modelwright.train.checkpoint.files import (
    PARTS,
    Best,
    check_checkpoint,
    list_checkpoints,
    read_weights,
    step_name,
)
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.writer import CheckpointWriter, Snapshot

STATE = {
    "position": {"step": 3, "loss": math.nan, "best": math.inf},
    "updates": {"optimizer": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}}},
    "list": [1, "two", torch.tensor([True, False])],
}


def snapshot(step):
    return Snapshot(step=step, weights={"w": torch.full((2, 3), step / 7)}, state=STATE)


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


@pytest.fixture
def checkpoints(tmp_path):
    made = CheckpointWriter(CheckpointReader(tmp_path / "checkpoints", digest="d"), keep_last=2)
    made.reader.prepare()
    yield made
    made.close()


def save(checkpoints, *numbers, best=0):
    for step in numbers:
        checkpoints.save(snapshot(step), best=Best(step=best, loss=1.5))
    checkpoints.wait()


def latest(checkpoints, note):
    """The newest whole checkpoint, loaded into tensors that hold something else before."""
    step = checkpoints.reader.latest_step(note)
    if not step:
        return None
    weights = {name: torch.full_like(weight, 7) for name, weight in read_weights(checkpoints.folder, step).items()}
    state = checkpoints.reader.load(step, weights)
    return Snapshot(step=step, weights=weights, state=state)


def fail(text):
    raise AssertionError(text)


def test_round_trip_is_bit_identical(checkpoints):
    save(checkpoints, 3)
    found = latest(checkpoints, fail)
    assert found.step == 3
    assert torch.equal(found.weights["w"], torch.full((2, 3), 3 / 7))
    assert math.isnan(found.state["position"]["loss"])
    assert found.state["position"]["best"] == math.inf
    assert torch.equal(found.state["updates"]["optimizer"]["w"]["exp_avg"], torch.arange(4.0))
    assert found.state["list"][:2] == [1, "two"]
    assert found.state["list"][2].dtype == torch.bool
    json.loads((checkpoints.folder / "step-00000003" / "state.json").read_text(), parse_constant=fail)


def test_one_process_writes_plain_safetensors(checkpoints):
    save(checkpoints, 3)
    weights = load_file(checkpoints.folder / "step-00000003" / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {"w": (2, 3)}


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"w": torch.zeros(3, 2)}, r"w has shape \[2, 3\], the model needs \[3, 2\]"),
        ({"w": torch.zeros(2, 3), "v": torch.zeros(1)}, "v is in the model only"),
        ({}, "w is in the checkpoint only"),
    ],
)
def test_another_models_checkpoint_is_refused(checkpoints, weights, text):
    save(checkpoints, 3)
    with pytest.raises(ArtifactError, match=text):
        checkpoints.reader.load(3, weights)


def test_copies_in_memory_outlive_the_process_and_belong_to_one_folder(tmp_path):
    def make():
        made = CheckpointWriter(
            CheckpointReader(tmp_path / "checkpoints", digest="d", memory=tmp_path / "memory"), keep_last=2
        )
        made.reader.prepare()
        return made

    first = make()
    save(first, 3)
    for step in (4, 5, 6):
        first.keep(snapshot(step), best=Best())
    first.close()
    second = make()
    weights = {"w": torch.zeros(2, 3)}
    assert second.reader.latest_step(lambda text: None) == 6
    assert torch.isnan(torch.tensor(second.reader.load(6, weights)["position"]["loss"]))
    assert torch.equal(weights["w"], snapshot(6).weights["w"])
    assert len(list((tmp_path / "memory").glob("*/step-*"))) == 2
    save(second, 7)
    assert make().reader.latest_step(fail) == 7
    second.keep(snapshot(8), best=Best(step=8))  # the best checkpoint was never finished on disk
    second.wait()
    assert make().reader.latest_step(fail) == 7
    shutil.rmtree(tmp_path / "checkpoints")
    assert make().reader.latest_step(fail) == 0
    second.forget()
    assert not list((tmp_path / "memory").glob("*/step-*"))
    second.close()


def test_saving_copies_before_it_returns(checkpoints):
    weight = torch.zeros(4)
    checkpoints.save(Snapshot(step=1, weights={"w": weight}, state={"m": weight}), best=Best())
    weight.fill_(9.0)
    checkpoints.wait()
    found = latest(checkpoints, fail)
    assert found.weights["w"].sum() == 0
    assert found.state["m"].sum() == 0


def test_only_weights_and_their_states_are_copied_after_it_returns(tmp_path, monkeypatch):
    """A forward pass changes buffers and states of techniques at once."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: LateDevice(patience_s=20))
    made = CheckpointWriter(CheckpointReader(tmp_path, digest="d"), keep_last=2)
    made.reader.prepare()
    weight, moment, buffer, amax = (torch.zeros(3) for _ in range(4))
    state = {"optimizer": {"w": {"exp_avg": moment}}, "techniques": {"amax": amax}}
    made.save(Snapshot(step=1, weights={"w": weight, "b": buffer}, state=state, gradients=["w"]), best=Best())
    buffer.fill_(9.0)
    amax.fill_(9.0)
    made.hold_changes()
    weight.fill_(9.0)
    moment.fill_(9.0)
    made.close()
    for part, num_tensors in (("model", 2), ("training", 2)):
        found = load_file(tmp_path / step_name(1) / f"{part}.safetensors")
        assert len(found) == num_tensors
        assert not any(tensor.any() for tensor in found.values()), found


@pytest.mark.parametrize("in_backward", [False, True])
def test_copies_beside_training_are_of_the_step_of_their_checkpoint(tiny, tmp_path, monkeypatch, in_backward):
    """On CUDA weights are copied while the next step runs; here as late as something waits for it."""
    config = tiny.settings(checkpoint_every_steps=1, keep_last=20, optimizer_in_backward=in_backward)
    tiny.run(tmp_path / "at once", config)
    device = LateDevice(patience_s=0.3)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    tiny.run(tmp_path / "late", config)
    assert any(stream.num_done for stream in device.streams)
    for step in range(1, 13):
        expected, found = (
            {name: tensor for part in PARTS for name, tensor in load_file(folder / f"{part}.safetensors").items()}
            for folder in (tmp_path / run / "checkpoints" / step_name(step) for run in ("at once", "late"))
        )
        assert expected.keys() == found.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == [], step


def read_best(folder: Path) -> Best:
    record = json.loads((folder / "best.json").read_text())
    assert record["folder"] == step_name(record["step"])
    assert (folder / record["folder"]).is_dir()
    return Best(step=record["step"], loss=record["loss"])


def test_saving_does_not_wait_for_the_disk(checkpoints, monkeypatch):
    go_on = threading.Event()
    save_file = writer.save_file
    monkeypatch.setattr(writer, "save_file", lambda *a: (go_on.wait(20), save_file(*a)))
    checkpoints.save(snapshot(1), best=Best())
    assert steps(checkpoints.folder) == []
    go_on.set()
    checkpoints.wait()
    assert steps(checkpoints.folder) == [1]


def test_the_last_and_the_best_are_kept(checkpoints):
    save(checkpoints, 1, 2, best=1)
    save(checkpoints, 3, 4, 5, best=2)
    assert steps(checkpoints.folder) == [2, 4, 5]
    assert read_best(checkpoints.folder) == Best(step=2, loss=1.5)
    assert read_weights(checkpoints.folder, 2)["w"][0, 0] == torch.tensor(2 / 7)
    save(checkpoints, 6, best=6)
    assert steps(checkpoints.folder) == [2, 5, 6]  # going back to 5 must find its best one
    save(checkpoints, 7, best=6)
    assert steps(checkpoints.folder) == [6, 7]


def test_damage_right_after_writing_does_not_cost_the_checkpoints_it_refers_to(checkpoints, monkeypatch):
    save(checkpoints, 1, 2, 3)
    written = checkpoints.write_best

    def damaging(best):
        written(best)
        (checkpoints.folder / "step-00000004" / "manifest.json").write_text("{}")

    monkeypatch.setattr(checkpoints, "write_best", damaging)
    checkpoints.save(snapshot(4), best=Best(), also=[2])
    checkpoints.wait()
    assert steps(checkpoints.folder) == [2, 3, 4]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_a_bit, lambda path: os.truncate(path, 30), os.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(checkpoints, name, damage):
    save(checkpoints, 1, 2)
    damage(checkpoints.folder / "step-00000002" / name)
    notes = []
    assert latest(checkpoints, notes.append).step == 1
    assert len(notes) == 1
    assert name in notes[0]
    assert "step-00000002" in notes[0]
    save(checkpoints, 2, 3)
    assert latest(checkpoints, fail).step == 3
    assert [path.name for path in checkpoints.folder.glob("*.damaged*")] == ["step-00000002.damaged"]


def test_all_checkpoints_damaged_is_an_error_and_restart_keeps_them(checkpoints):
    save(checkpoints, 1, 2)
    for step in (1, 2):
        flip_a_bit(checkpoints.folder / f"step-0000000{step}" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"all checkpoints in .* are damaged: .*0002.*0001.*--restart"):
            checkpoints.reader.latest_step(fail)
        assert steps(checkpoints.folder) == [1, 2]
    notes = []
    assert checkpoints.reader.latest_step(notes.append, restart=True) == 0
    assert [note.rpartition(" ")[2] for note in notes] == ["step-00000002.damaged", "step-00000001.damaged"]
    save(checkpoints, 1, 2, 3, 4)
    assert steps(checkpoints.folder) == [3, 4]
    assert len(list(checkpoints.folder.glob("*.damaged"))) == 2


def test_damaged_twice_at_one_step_both_are_kept(checkpoints):
    for _ in range(3):
        save(checkpoints, 1, 2)
        flip_a_bit(checkpoints.folder / "step-00000002" / "model.safetensors")
        assert latest(checkpoints, lambda text: None).step == 1
    names = {path.name for path in checkpoints.folder.glob("*.damaged*")}
    assert names == {f"step-00000002.damaged{number}" for number in ("", "-2", "-3")}


def test_another_runs_checkpoint_is_refused(checkpoints):
    save(checkpoints, 1)
    with pytest.raises(ArtifactError, match="another configuration"):
        check_checkpoint(checkpoints.folder / "step-00000001", digest="other")


def test_half_written_ones_are_removed_at_the_start(checkpoints):
    save(checkpoints, 1)
    half = checkpoints.folder / "step-00000002.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    checkpoints.reader.prepare()
    assert not half.exists()
    assert latest(checkpoints, fail).step == 1


def test_a_refused_write_surfaces_once_and_leaves_the_old_one(checkpoints, monkeypatch):
    save(checkpoints, 1)

    def refuse(tensors, path):
        raise writer.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(writer, "save_file", refuse)
    checkpoints.save(snapshot(2), best=Best())
    with pytest.raises(StorageError, match="the disk is full; free some space"):
        checkpoints.wait()
    checkpoints.wait()
    assert steps(checkpoints.folder) == [1]
    assert not list(checkpoints.folder.glob("*.partial"))


def test_a_full_disk_is_one_clear_error(tmp_path):
    """A real one: a tmpfs of 256 KiB, where the system lets us mount it."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        full = CheckpointWriter(CheckpointReader(tmp_path / "checkpoints", digest="d"), keep_last=2)
        full.reader.prepare()
        save(full, 1)
        full.save(Snapshot(step=2, weights={"w": torch.zeros(100_000)}, state={}), best=Best())
        with pytest.raises(StorageError, match="the disk is full"):
            full.wait()
        full.close()
        assert steps(full.folder) == [1]
        assert latest(full, fail).step == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_damaged_best_checkpoint_is_forgotten_when_a_run_goes_on(tiny, tmp_path):
    """It would end the run with an error after all training, at every attempt."""
    notes = []

    class Progress(SilentProgress):
        def note(self, text):
            notes.append(text)

    with pytest.raises(Stopped):
        tiny.run(tmp_path, techniques=tiny.watching(stop=tiny.StopAfter(8)))
    folder = tmp_path / "checkpoints"
    best = read_best(folder)
    assert 0 < best.step < 8
    flip_a_bit(folder / f"step-{best.step:08d}" / "model.safetensors")
    result = tiny.run(tmp_path, progress=Progress())
    assert result.best.step > 8
    assert read_best(folder) == result.best
    assert (folder / f"step-{best.step:08d}.damaged").is_dir()
    assert notes[0].startswith(f"the checkpoint of the best step, {best.step}, is damaged; it is kept as step-")
