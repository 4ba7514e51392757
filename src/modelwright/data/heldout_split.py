"""Which documents of a corpus are held out, where they do not say so themselves."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Split


@dataclass(frozen=True)
class Unsplit:
    """A document whose split will be decided by its hash."""

    document: Document


def with_splits(documents: Iterator[Document | Unsplit], fraction: float, rest: Split) -> Iterator[Document]:
    """Decide the open splits by a hash, so that equal texts, and all captions of one image, get the same split.

    If a kind has two or more documents, at least one is held out: until the first one is, the document with the
    smallest hash is retained.
    """
    kept_back: dict[str, tuple[float, Document]] = {}
    num_train: dict[str, int] = {}
    with_heldout: set[str] = set()
    for result in documents:
        if isinstance(result, Document):
            if result.split == "heldout":
                with_heldout.add(result.kind)
            yield result
            continue
        document = replace(result.document, split=rest)
        place = derive_seed(0, "heldout", document.split_key) / 2**63 if fraction else 1.0
        if place < fraction:
            with_heldout.add(document.kind)
            yield replace(document, split="heldout")
            continue
        num_train[document.kind] = num_train.get(document.kind, 0) + 1
        if fraction and document.kind not in with_heldout:
            smallest = kept_back.setdefault(document.kind, (place, document))
            if smallest[1] is document:
                continue
            if place < smallest[0]:
                kept_back[document.kind], document = (place, document), smallest[1]
        yield document
    for kind, (_, document) in kept_back.items():
        needed = kind not in with_heldout and num_train[kind] > 1
        yield replace(document, split="heldout") if needed else document
