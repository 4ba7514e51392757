"""The texts that a model was trained on, and those that it must never be trained on, from its chain of runs.

A run contributes the texts that it was trained on; an update contributes its new texts only, because its old ones are a
sample of those of earlier runs. A replay is drawn from all of them as one body: every text has the same chance, so each
contribution is replayed in proportion to its size, however many updates followed it.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from modelwright.core.artifacts import RunDir, is_finished, read_manifest
from modelwright.core.config import derive_seed
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document
from modelwright.data.sources.sources import is_own
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.clean import CLEAN
from modelwright_continual.ancestry import Ancestry
from modelwright_continual.heldout import text_key
from modelwright_continual.update_files import HELDOUT_FILE, KIND, NEW, data_folder, is_update


def learned_texts(run: RunDir) -> Iterator[Document]:
    """Yields the cleaned texts that a run contributed, without images and texts that Modelwright generated; none if
    they are gone.
    """
    if not has_texts(run):
        return
    is_of_update = is_update(run)
    for document in read_kept(run.stage(CLEAN.name).artifact, split="train"):
        is_brought = not is_of_update or document.source == NEW
        if is_brought and document.kind != "image" and not is_own(document.meta):
            yield document


def heldout_texts(run: RunDir) -> Iterator[Document]:
    """Yields the texts that a run held out and, for an update, everything that it had to leave alone: its benchmark,
    and the texts that the runs before it held out.
    """
    if has_texts(run):
        yield from read_kept(run.stage(CLEAN.name).artifact, split="heldout")
    if is_update(run):
        with open(data_folder(run) / HELDOUT_FILE, encoding="utf-8") as file:
            yield from (Document.from_json(line) for line in file)


def different_texts(documents: Iterator[Document]) -> list[Document]:
    """Returns the first document of each distinct text."""
    by_text: dict[str, Document] = {}
    for document in documents:
        by_text.setdefault(text_key(document), document)
    return list(by_text.values())


def has_texts(run: RunDir) -> bool:
    return is_finished(run.stage(CLEAN.name).artifact)


def content_digests(runs: Sequence[RunDir]) -> list[str]:
    """Returns the content digests of the runs' cleaned texts and update data; "" for those that do not exist."""
    folders = [folder for run in runs for folder in (run.stage(CLEAN.name).artifact, data_folder(run))]
    return [read_manifest(folder).content_digest if is_finished(folder) else "" for folder in folders]


def unknown_texts(ancestry: Ancestry) -> str:
    """Explains why some texts that a model was trained on are not known; "" if all are."""
    if not any(read_run_config(run.config).has(CLEAN) for run in ancestry.runs):
        return "the model is not a run, so its texts are not known"
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
    """A random sample of at least `wanted` bytes, or everything if there are fewer. It depends on the seed and the
    texts only, not on their order, and holds no more than it will return. Equal texts count once.
    """

    seed: int
    wanted: float
    num_bytes: int = 0
    num_texts: int = 0
    _drawn: list[tuple[int, Document]] = field(default_factory=list[tuple[int, Document]])
    """Heap with the highest rank first."""
    _ranks: set[int] = field(default_factory=set[int])

    def add(self, document: Document) -> None:
        # Texts of the lowest ranks are kept, so the order in which they are added does not matter.
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
        """Returns the sampled texts, ordered by rank."""
        return [document for _, document in sorted(self._drawn, key=lambda drawn: -drawn[0])]


def num_bytes(document: Document) -> int:
    return len(document.text.encode("utf-8"))
