"""The unit that travels from sources through cleaning to tokens, and which documents of a corpus are held out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from modelwright.core.config import derive_seed

Kind = Literal["prose", "code", "qa", "image"]
Split = Literal["train", "heldout", "open"]
"""`open`: the run that reads the document decides."""
Message = Mapping[str, Any]
"""One turn of a conversation: `role` ("system", "user", "assistant", "tool") and `content`, a text. A turn of the
assistant may have `tool_calls` (`{"type": "function", "function": {"name": ..., "arguments": {...}}}`), and the tool's
answer the `name` or the `tool_call_id` of its call. `reasoning_content` is the text of the assistant's thought. These
are the names that chat templates know. An assistant's turn with `train: False` is context: it is not learned."""

WEIGHT = "epoch_weight"
"""Field of `Document.meta`: how many times each epoch of a training has the document."""
KINDS: tuple[Kind, ...] = ("prose", "code", "qa", "image")
SPLITS: tuple[Split, ...] = ("train", "heldout")
"""The splits of a run."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text with where it came from.

    `id` is unique within a corpus and names the origin (module, file and line); `source` names the corpus. A "qa"
    document carries its conversation in `meta`: `question` and `answer`, or `messages` when it has other turns, and
    `tools` where the assistant may call any; its `text` is what the turns say, a blank line between them.
    `meta["chat_template_kwargs"]` holds variables of the chat template, such as `enable_thinking`.
    `meta["rejected"]` of a preference pair holds the turns of the rejected answer, which take the place of the
    conversation's last ones, and `meta["margin"]` by how much it is worse, where that is known. `meta["desirable"]`
    says whether a single answer is a good one. `meta["prompt_turns"]` of either counts the turns before the answer.
    An "image" document is an image, `meta["image"]` (`data/images/decode.py`), and its caption, the text; or a
    conversation about the image, which it has like a "qa" document.
    `meta["title"]`, where present, is a heading line that the text begins with, of a "qa" document the words that the
    answer begins with: texts that differ in their titles only are duplicates.
    """

    id: str
    text: str
    kind: Kind
    split: Split
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_turns(self) -> bool:
        """True if the document has a conversation."""
        return "messages" in self.meta or {"question", "answer"} <= self.meta.keys()

    @property
    def messages(self) -> list[Message]:
        """The conversation of a document that has one."""
        if "messages" in self.meta:
            return list(self.meta["messages"])
        question, answer = self.meta["question"], self.meta["answer"]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    @property
    def has_answer(self) -> bool:
        """True for a conversation with an answer, and not only a prompt to answer."""
        return self.has_turns and any(turn["role"] == "assistant" for turn in self.messages)

    @property
    def tools(self) -> Sequence[Any]:
        """The functions that the assistant of a "qa" document may call, as JSON schemas."""
        return self.meta.get("tools", ())

    @property
    def rejected(self) -> list[Message]:
        """The turns of the rejected answer of a preference pair; empty for other documents."""
        return list(self.meta.get("rejected", ()))

    @property
    def prompt_turns(self) -> int:
        """Number of turns before the answer of a preference."""
        return int(self.meta.get("prompt_turns", len(self.messages) - 1))

    @property
    def identity(self) -> str:
        """Key by which documents are equal: the text; for an image, its caption and its data."""
        return f"{self.text}\n{self.split_key}" if self.kind == "image" else self.text

    @property
    def is_judged(self) -> bool:
        """True for a preference: an answer with a rejected one, or with a label."""
        return "rejected" in self.meta or "desirable" in self.meta

    @property
    def learned(self) -> str:
        """All that is learned of a conversation: its turns, and where it has them the rejected answer, the label, the
        tools, and which answers are context only."""
        extra: dict[str, Any] = {key: self.meta[key] for key in ("desirable", "tools") if key in self.meta}
        if context := [number for number, turn in enumerate(self.messages) if not turn.get("train", True)]:
            extra["context"] = context
        text = join_turns([*self.messages, *self.rejected])
        return "\n".join([text, json.dumps(extra, ensure_ascii=False, sort_keys=True)]) if extra else text

    @property
    def split_key(self) -> str:
        """Documents with equal keys get the same split: the text, or for an image the image, whatever its caption."""
        return self.meta["image"]["data"] if self.kind == "image" else self.text

    @property
    def is_undesirable(self) -> bool:
        """True for a single answer that the model should not learn to give."""
        return not self.meta.get("desirable", True)

    @property
    def body(self) -> str:
        """The identifying part, without the title: the text, or for "qa" the answers, the rejected one included."""
        title = self.meta.get("title", "")
        if self.kind == "qa":
            answers = [turn for turn in (*self.messages, *self.rejected) if turn["role"] == "assistant"]
            return join_turns(answers).removeprefix(title)
        return self.text.removeprefix(title).lstrip("\n")

    def map_text(self, change: Callable[[str], str]) -> "Document":
        """The document with `change` applied to its text (for "qa" to each turn), its title and its summary."""
        meta = dict(self.meta)
        for key in ("title", "summary", "question", "answer"):
            if key in meta:
                meta[key] = change(meta[key])
        for key in ("messages", "rejected"):
            if key in meta:
                meta[key] = [map_turn(turn, change) for turn in meta[key]]
        if self.kind == "qa" or (self.kind == "image" and self.has_turns):
            return replace(changed := replace(self, meta=meta), text=join_turns(changed.messages))
        return replace(self, text=change(self.text), meta=meta)

    def to_json(self) -> str:
        """Serializes to one JSON line, without the line end; `from_json` reads it back."""
        return json.dumps(self.plain(), ensure_ascii=False)

    def plain(self) -> dict[str, Any]:
        """The fields as plain data. An open split is omitted: the run that reads the record decides it."""
        fields = vars(self) | {"meta": dict(self.meta)}
        return {name: value for name, value in fields.items() if (name, value) != ("split", "open")}

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> "Document":
        """The inverse of `plain`."""
        return cls(**{"split": "open", **fields})

    @classmethod
    def from_json(cls, line: str | bytes) -> "Document":
        return cls.from_plain(json.loads(line))


def says_something(turn: Message) -> bool:
    """True if a turn has text or calls tools."""
    return bool(turn["content"].strip() or turn.get("tool_calls"))


def join_turns(messages: Sequence[Message]) -> str:
    """The text of a conversation: thoughts, contents, and calls of tools as lines of JSON."""
    texts: list[str] = []
    for turn in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
        thought = [turn["reasoning_content"]] if turn.get("reasoning_content") else []
        texts.append("\n".join([*thought, *([turn["content"]] if turn["content"] or not calls else []), *calls]))
    return "\n\n".join(texts)


def map_turn(turn: Message, change: Callable[[str], str]) -> Message:
    """The turn with `change` applied to its content, its thought, and the texts in the arguments of its calls."""
    changed = {**turn, "content": change(turn["content"])}
    if "reasoning_content" in turn:
        changed["reasoning_content"] = change(turn["reasoning_content"])
    if "tool_calls" in turn:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _mapped(call["function"]["arguments"], change)}}
            for call in turn["tool_calls"]
        ]
    return changed


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with its texts changed, but not the keys of its objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    return value


@dataclass(frozen=True)
class Unsplit:
    """A document whose split will be decided by its hash."""

    document: Document


def with_splits(documents: Iterator[Document | Unsplit], fraction: float, rest: Split) -> Iterator[Document]:
    """Decides the open splits by a hash, so that equal texts, and all captions of one image, get the same split.

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
        # A hash instead of a random draw: the split of a text survives a new order and new neighbors.
        place = derive_seed(0, "heldout", document.split_key) / 2**63 if fraction else 1.0
        if place < fraction:
            with_heldout.add(document.kind)
            yield replace(document, split="heldout")
            continue
        # Below: the document with the smallest hash so far waits, in case no other one of its kind is held out.
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
