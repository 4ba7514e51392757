"""Copies of a run's state in the memory of its hosts, for fast recovery when a process or a host is lost.

A copy is a checkpoint folder in an in-memory file system, which outlives the processes: each rank's files are on its
own host and on that of another rank. Unless two neighbors are lost together, the remaining hosts have all of it. They
exchange missing files and read the copy like a checkpoint on disk.
"""

import hashlib
import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelwright.core.errors import writing
from modelwright.parallel.control_plane import ControlPlane
from modelwright.train.checkpoint.files import STATE, step_name
from modelwright.train.checkpoint.sharded_tensors import INDEX, DamagedCheckpointError, ShardReader, read_index

NUM_KEPT = 2
"""The newest copy may be incomplete somewhere when a host goes; then the one before is taken."""


class MemoryCopies:
    """The copies of one run on this host. Every rank creates one and calls the same methods in the same order. root: a
    folder in memory, separate on each host; key: identifies this run.
    """

    def __init__(self, root: Path, key: str, channel: ControlPlane) -> None:
        self.host = f"{socket.gethostname()}:{root}"
        name = hashlib.sha256(f"{self.host}:{key}".encode()).hexdigest()[:16]
        self.folder = root / f"modelwright-{name}"
        self.channel = channel

    def write(self, step: int, files: Mapping[str, bytes], index: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Store this rank's files here and on its peer; index and record (equal on all ranks) everywhere."""
        what = f"copying step {step} to memory"
        folder = self.folder / step_name(step)
        partial = folder.with_name(f"{folder.name}.partial")
        hosts, names = zip(
            *self.channel.exchange((self.host, {name: len(data) for name, data in files.items()}), what=what),
            strict=True,
        )
        pairs = peers(hosts)
        received = self.channel.move(
            [
                (torch.frombuffer(bytearray(data), dtype=torch.uint8), to)
                for source, to in pairs
                if source == self.channel.rank
                for data in files.values()
            ],
            [(size, source) for source, to in pairs if to == self.channel.rank for size in names[source].values()],
            what=what,
        )
        others = [name for source, to in pairs if to == self.channel.rank for name in names[source]]

        def store() -> None:
            with writing(partial):
                partial.mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (partial / name).write_bytes(data)
                for name, tensor in zip(others, received, strict=True):
                    tensor.numpy().tofile(partial / name)
                if self._speaks(hosts):
                    (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
                    (partial / STATE).write_text(json.dumps(record), encoding="utf-8")

        # Every rank has stored its files once `attempt` returns, so the name without .partial means a whole folder.
        self.channel.attempt(store, what=what)
        if self._speaks(hosts):
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in [*self._steps()[:-NUM_KEPT], *self.folder.glob("*.partial")]:
                shutil.rmtree(old, ignore_errors=True)

    def newest(self, *, after: int) -> Path | None:
        """The newest complete copy after the step `after`, assembled on this host; or None."""
        offers = self.channel.exchange((self.host, self._offer(after)), what="looking for copies in memory")
        hosts = [host for host, _ in offers]
        # Copies are told apart by step and digest: hosts may hold states of the same step from different starts. One
        # is usable only if each of its files has an owner, the first rank that holds it undamaged.
        owners: dict[tuple[int, str], dict[str, int]] = {}
        needed: dict[tuple[int, str], list[str]] = {}
        for rank, (_, offer) in enumerate(offers):
            for step, digest, whole, held in offer:
                needed[step, digest] = whole
                for name in held:
                    owners.setdefault((step, digest), {}).setdefault(name, rank)
        complete = [key for key, names in needed.items() if set(names) <= set(owners.get(key, {}))]
        if not complete:
            return None
        key = max(complete)
        folder = self.folder / step_name(key[0])
        own: list[tuple[int, str, list[str], list[str]]] = offers[self.channel.rank][1]
        local = next((held for step, digest, _, held in own if (step, digest) == key), list[str]())
        # Collective: all ranks enter `any` for each file in the same order, and the broadcast if any of them lacks it.
        for name in [*needed[key], INDEX, STATE]:
            path, what = folder / name, f"gathering {name}"
            lacks = name not in local if name in needed[key] else not local
            if not self.channel.any(lacks, what=what):
                continue
            owner = owners[key].get(name, min(owners[key].values()))
            is_owner = self.channel.rank == owner
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) if is_owner else None
            size = max(self.channel.exchange(0 if data is None else data.numel(), what=what))
            data = torch.empty(size, dtype=torch.uint8) if data is None else data
            self.channel.broadcast(data, source=owner, what=what)
            if lacks and self._speaks(hosts) and not is_owner:
                path.parent.mkdir(parents=True, exist_ok=True)
                data.numpy().tofile(path)
        self.channel.exchange(None, what="copies gathered")
        return folder

    def forget(self) -> None:
        """Free the memory."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _offer(self, after: int) -> list[tuple[int, str, list[str], list[str]]]:
        """Lists this host's copies: step, digest, names of all files of the copy, and of those intact on this host."""
        result: list[tuple[int, str, list[str], list[str]]] = []
        for folder in self._steps():
            step = int(folder.name.removeprefix("step-"))
            if step > after:
                try:
                    index = read_index(folder)
                    digest = hashlib.sha256((folder / INDEX).read_bytes() + (folder / STATE).read_bytes()).hexdigest()
                except (DamagedCheckpointError, OSError):
                    continue
                entries = (entry for part in index.values() for entry in part.values())
                names = sorted({piece["file"] for entry in entries for piece in entry["pieces"]})
                readers = [ShardReader(folder, part) for part in index.values()]
                intact = [name for name in names if all(reader.is_whole(name) for reader in readers)]
                result.append((step, digest, names, intact))
        return result

    def _speaks(self, hosts: Sequence[str]) -> bool:
        """True for the first rank of its host, which writes the files that its ranks have in common."""
        return hosts.index(self.host) == self.channel.rank

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != ".partial")


def peers(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (rank, rank that keeps its copy), by the hosts of all ranks: always on another host, in a ring, so that
    each host stores about as much as it owns. Empty with one host.
    """
    # The first ranks of all hosts, then the second ones, ...: neighbors in the ring are mostly on different hosts.
    places = [(hosts[:rank].count(host), hosts.index(host), rank) for rank, host in enumerate(hosts)]
    ring = [rank for *_, rank in sorted(places)]
    pairs: list[tuple[int, int]] = []
    for position, rank in enumerate(ring):
        others = [other for other in ring[position + 1 :] + ring[:position] if hosts[other] != hosts[rank]]
        if others:
            pairs.append((rank, others[0]))
    return sorted(pairs)
