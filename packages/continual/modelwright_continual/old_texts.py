"""What a model has learned from and what it must never learn from, by the runs that it has learned in.

The texts that a run has brought are those that it trained on; of an update the new ones, because its old ones are a
sample of what earlier runs brought. A replay is drawn from all of them as if they were one body: every text has the
same chance, so each body is replayed in proportion to its size, whatever the number of updates since.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from modelwright.core.artifacts import is_finished, read_manifest
from modelwright.core.rundir import RunDir
from modelwright.core.seeds import derive_seed
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.data.sources.records import is_own
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.clean import CLEAN
from modelwright_continual.ancestry import Ancestry
from modelwright_continual.heldout import text_key
from modelwright_continual.update_files import HELDOUT_FILE, KIND, NEW, data_folder, is_update


def learned_texts(run: RunDir) -> Iterator[Document]:
    """The cleaned texts that a run has brought, without images and what Modelwright wrote itself; nothing if they are
    gone.
    """
    if not has_texts(run):
        return
    is_of_update = is_update(run)
    for document in read_kept(run.stage(CLEAN.name).artifact, split="train"):
        is_brought = not is_of_update or document.source == NEW
        if is_brought and document.kind != "image" and not is_own(document.meta):
            yield document


def heldout_texts(run: RunDir) -> Iterator[Document]:
    """What a run has held out of its own texts and, if it is an update, everything that it had to leave alone: its
    benchmark, and what the runs before it held out.
    """
    if has_texts(run):
        yield from read_kept(run.stage(CLEAN.name).artifact, split="heldout")
    if is_update(run):
        with open(data_folder(run) / HELDOUT_FILE, encoding="utf-8") as file:
            yield from (Document.from_json(line) for line in file)


def different_texts(documents: Iterator[Document]) -> list[Document]:
    """The first document of each text."""
    by_text: dict[str, Document] = {}
    for document in documents:
        by_text.setdefault(text_key(document), document)
    return list(by_text.values())


def has_texts(run: RunDir) -> bool:
    return is_finished(run.stage(CLEAN.name).artifact)


def content_digests(runs: Sequence[RunDir]) -> list[str]:
    """What decides the texts of some runs."""
    folders = [folder for run in runs for folder in (run.stage(CLEAN.name).artifact, data_folder(run))]
    return [read_manifest(folder).content_digest if is_finished(folder) else "" for folder in folders]


def unknown_texts(ancestry: Ancestry) -> str:
    """Why some of the texts that a model has learned from are not known; "" if all are."""
    if not any(read_run_config(run.config).has(CLEAN) for run in ancestry.runs):
        return "the model is no run, so its texts are not known"
    for run in ancestry.runs:
        if read_run_config(run.config).has(CLEAN) and not has_texts(run):
            return f"{run.path} has no cleaned texts anymore"
        if is_update(run):
            facts = read_manifest(data_folder(run), kind=KIND).facts
            if facts["old_sources"]:
                names = ", ".join(source["name"] for source in facts["old_sources"])
                return f"{run.path} replayed texts that no run has cleaned ({names}), which have to be named again"
            if facts["own_texts"]:
                return f"{run.path} replayed what its model wrote itself, because older texts are not known"
    return f"{ancestry.lost} is gone, and with it the texts of its run" if ancestry.lost else ""


@dataclass
class ReplaySample:
    """A random sample of as many bytes as `wanted` asks for, or all that there are. It is a function of the seed and
    the texts, whatever their order, and holds no more than it will return. A text counts once.
    """

    seed: int
    wanted: float
    num_bytes: int = 0
    num_texts: int = 0
    _drawn: list[tuple[int, Document]] = field(default_factory=list[tuple[int, Document]])
    """A heap by falling rank."""
    _ranks: set[int] = field(default_factory=set[int])

    def add(self, document: Document) -> None:
        rank = derive_seed(self.seed, "replay", document.identity)
        self.num_texts += 1
        if rank in self._ranks:
            return
        heapq.heappush(self._drawn, (-rank, document))
        self._ranks.add(rank)
        self.num_bytes += num_bytes(document)
        while self._drawn and self.num_bytes - num_bytes(self._drawn[0][1]) >= self.wanted:
            highest, last = heapq.heappop(self._drawn)
            self._ranks.remove(-highest)
            self.num_bytes -= num_bytes(last)

    def texts(self) -> list[Document]:
        """By rank."""
        return [document for _, document in sorted(self._drawn, key=lambda drawn: -drawn[0])]


def num_bytes(document: Document) -> int:
    return len(document.text.encode("utf-8"))
