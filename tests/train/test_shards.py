"""Checkpoints of several real processes: any layout loads under any other, and damage anywhere is known everywhere."""

import os
import shutil

import pytest
import shard_run
from safetensors.torch import load_file

from distributed import start_distributed
from modelwright.train.checkpoint.files import list_checkpoints, read_weights
from modelwright.train.checkpoint.reader import peers

pytestmark = pytest.mark.slow

DIED = 9
NUM_COPIES = {"copies2": 2, "fsdp2tp2": 1, "pp2fsdp2": 1, "hybrid2x2": 2}
"""The layouts that are written, and how many ranks of each a transport joins."""


def launch(folder, size, *actions):
    """What each rank returned; all are well but those that were told to die."""
    exits = start_distributed(shard_run.act, size, folder, actions, joins_world=False).wait()
    assert all(rank.code in (0, DIED) for rank in exits), [rank.output[-3000:] for rank in exits]
    return [rank.result or "" for rank in exits]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    assert launch(folder, 2, "copies2:copies2:save:3:7") == ["ok"] * 2
    saves = [f"{layout}:{layout}:save:3:7" for layout in ("fsdp2tp2", "pp2fsdp2", "hybrid2x2")]
    assert launch(folder, 4, *saves) == ["ok"] * 4
    return folder


@pytest.mark.parametrize(
    ("size", "layouts"), [(1, ["one"]), (3, ["tp3"]), (4, ["copies2tp2", "fsdp2tp2", "pp2fsdp2", "hybrid2x2"])]
)
def test_any_layout_loads_under_any_other(written, size, layouts):
    checks = [f"{layout}:{source}:check:{copies}:7" for layout in layouts for source, copies in NUM_COPIES.items()]
    assert launch(written, size, *checks) == ["ok"] * size


def test_whole_weights_come_out_of_any_layout(written):
    """The same bits, whoever wrote them."""
    expected = read_weights(written / "copies2", 7)
    for layout in NUM_COPIES:
        found = read_weights(written / layout, 7)
        assert set(found) == set(expected)
        assert all((found[name] == expected[name]).all() for name in expected)


def test_each_piece_is_written_once_and_the_writing_is_shared(written):
    """The merged index is refused when pieces leave gaps or overlap; here the ranks' shares are weighed."""
    num_values = 7 * 5 + 5 * 9 + 5 + 7 + 33
    for layout, size in (("copies2", 2), ("fsdp2tp2", 4), ("pp2fsdp2", 4), ("hybrid2x2", 4)):
        shares = {part: [0] * size for part in ("model", "training")}
        for part, volumes in shares.items():
            for rank in range(size):
                tensors = load_file(written / layout / "step-00000007" / f"{part}-{rank:05d}-of-{size:05d}.safetensors")
                volumes[rank] = sum(tensor.numel() for tensor in tensors.values())
        assert sum(shares["model"]) == num_values
        total = [a + b for a, b in zip(*shares.values(), strict=True)]
        assert max(total) < 1.5 * sum(total) / size


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
def test_damage_in_one_ranks_file_sends_all_ranks_one_back(written, tmp_path, damage):
    shutil.copytree(written / "hybrid2x2", tmp_path / "x")
    file = "training-00002-of-00004.safetensors"
    damage(tmp_path / "x" / "step-00000007" / file)
    first, *others = launch(tmp_path, 2, "copies2:x:check:2:3")
    assert others == ["ok"]
    assert file in first
    assert "it is kept as" in first
    if damage is flip_a_bit:
        assert "damaged: updates/optimizer/" in first or "damaged: transport/" in first
    assert [path.name for path in list_checkpoints(tmp_path / "x")] == ["step-00000003"]


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path):
    outcomes = launch(tmp_path, 2, "copies2:x:save:3", "copies2:x:full:7")
    assert outcomes[1].startswith("StorageError: ")
    assert "disk is full" in outcomes[1]
    assert outcomes[0].startswith("StorageError: writing checkpoint 7: rank 1 failed: ")
    assert "disk is full" in outcomes[0]
    assert [path.name for path in (tmp_path / "x").glob("step-*")] == ["step-00000003"]


def test_a_rank_that_dies_while_writing_is_an_error_on_the_others(tmp_path):
    outcomes = launch(tmp_path, 3, "tp3:x:save:3", "tp3:x:die:7")
    assert outcomes[1] == ""
    for text in (outcomes[0], outcomes[2]):
        assert text.startswith("LostRankError: writing checkpoint 7: another process of the run has exited")
    assert [path.name for path in list_checkpoints(tmp_path / "x")] == ["step-00000003"]
    assert launch(tmp_path, 1, "one:x:check:1:3") == ["ok"]


def test_copies_in_memory_survive_the_loss_of_a_host(tmp_path):
    """Four ranks on two hosts; each rank's copy is on both. Newer than the disk until the last copy is damaged."""
    keeps = [f"{layout}:{layout}:{what}" for layout in ("hybrid2x2", "pp2fsdp2") for what in ("save:3", "keep:4:5")]
    assert launch(tmp_path, 4, *keeps) == ["ok"] * 4
    shutil.rmtree(tmp_path / "memory0")
    again = ["fsdp2tp2:hybrid2x2:check:2:5", "copies2tp2:pp2fsdp2:check:1:5"]
    first, *others = launch(tmp_path, 4, *again)
    assert first.count("step 5 is in the memory of the hosts") == 2
    assert others == ["ok"] * 3
    shutil.rmtree(tmp_path / "memory1")
    assert launch(tmp_path, 1, "one:pp2fsdp2:check:1:5")[0].endswith("ok")
    for file in tmp_path.glob("memory0/*/step-*/training-00002-of-00004.safetensors"):
        flip_a_bit(file)
    assert launch(tmp_path, 1, "one:pp2fsdp2:check:1:3") == ["ok"]


def test_peers_are_on_other_hosts():
    assert peers(["a"]) == peers(["a", "a"]) == []
    assert peers(["a", "b"]) == [(0, 1), (1, 0)]
    assert peers(["a", "a", "b", "b"]) == [(0, 2), (1, 3), (2, 1), (3, 0)]
    for hosts in ("aab", "abc", "aabbcc", "abbb"):
        pairs = peers(hosts)
        assert [rank for rank, _ in pairs] == list(range(len(hosts)))
        assert all(hosts[rank] != hosts[peer] for rank, peer in pairs)
