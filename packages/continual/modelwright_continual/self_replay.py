"""Replay of texts that a model generates, for models whose training texts are gone (LAMOL, Sun et al. 2020,
https://arxiv.org/abs/1909.03329).

The texts are samples at temperature 1: documents from their first token, and conversations from the beginning of a
user's turn in the chat template, the question included. Each depends on the model, the seed and its number only, and
finished parts are kept, so a process that was killed resumes and ends with the same texts. Every text is marked as
Modelwright's own (`answer_by`), which no training accepts by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.config import DataError, derive_seed, digest
from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.sources.sources import AUTHOR_FIELD, OWN_AUTHOR
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.generate import Completion, generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.pipeline.resolve import resolved_device
from modelwright_continual.model_files import model_digest

PART_TEXTS = 32
"""Number of texts that are written together, which is also the largest loss of a killed process."""
MOST_TOKENS = 512
FEWEST_BYTES = 16
"""Minimum length of a text; shorter ones are left out as meaningless."""
_EMPTY_PARTS = 5
"""Number of parts without any text after which the model is considered unable to write one."""


@dataclass(frozen=True)
class SelfReplay:
    """A model that generates texts, and the folder where they are kept."""

    model: Path
    folder: Path
    seed: int

    @property
    def identity(self) -> str:
        """Digest of everything that determines the texts."""
        return digest([model_digest(self.model), self.seed, PART_TEXTS, MOST_TOKENS])

    def texts(self, form: str, wanted_bytes: float, progress: Progress) -> list[Document]:
        """Returns at least `wanted_bytes` of `text` or `conversations`. Raises `DataError` if the model writes none."""
        kept = self.folder / self.identity
        make_folder(kept)
        found: list[Document] = []
        num_bytes, part = 0, 0
        writer: _Writer | None = None
        progress.begin(f"{form} by the model itself", wanted_bytes, "bytes")
        while num_bytes < wanted_bytes:
            path = kept / f"{form}-{part:05d}.jsonl"
            if not path.exists():
                # Loads the model only if a part is missing.
                writer = writer or _Writer.load(self.model)
                documents = writer.write(form, range(part * PART_TEXTS, (part + 1) * PART_TEXTS), self.seed)
                write_atomic(path, "".join(document.to_json() + "\n" for document in documents))
            with open(path, encoding="utf-8") as file:  # its lines end at \n alone; texts may have other separators
                documents = [Document.from_json(line) for line in file]
            found += documents
            num_bytes, part = num_bytes + sum(len(document.text.encode()) for document in documents), part + 1
            progress.advance(min(num_bytes, wanted_bytes))
            if part >= _EMPTY_PARTS and not found:
                raise DataError(f"--self-replay: {self.model} writes no {form}; name files to replay with --old")
        progress.end()
        return found


@dataclass(frozen=True)
class _Writer:
    model: Decoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> "_Writer":
        model = load_model(folder)
        model.to(resolved_device("auto")).eval()
        return cls(model, Tokenizer.load(folder))

    def write(self, form: str, numbers: Sequence[int], seed: int) -> list[Document]:
        """Generates the texts with these numbers; those without content are left out."""
        contents: dict[str, Callable[[Sequence[int], int], list[dict[str, str]]]] = {
            "text": self._documents,
            "conversations": self._conversations,
        }
        written = contents[form](numbers, derive_seed(seed, "self-replay", form))
        return [
            _document(form, number, content)
            for number, content in zip(numbers, written, strict=True)
            if all(content.values()) and len("".join(content.values()).encode()) >= FEWEST_BYTES
        ]

    def _documents(self, numbers: Sequence[int], seed: int) -> list[dict[str, str]]:
        # Without a BOS token, a document follows the EOS of the one before it.
        begin = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        stops = (self.tokenizer.eos_id,)
        return [
            {"text": text} for text in self._sampled([[begin]] * len(numbers), numbers, seed, stops, may_break=True)
        ]

    def _conversations(self, numbers: Sequence[int], seed: int) -> list[dict[str, str]]:
        """Generates a question and its answer per number. A question that leaves no space for an answer gets none."""
        begin, end = self.tokenizer.chat.question_bounds()
        # The model may also end its question with an ordinary stop token.
        stops = tuple(dict.fromkeys((end, *self.tokenizer.stop_ids)))
        questions = self._sampled([begin] * len(numbers), numbers, derive_seed(seed, "question"), stops)
        prompts = [self.tokenizer.chat.encode_prompt([{"role": "user", "content": question}]) for question in questions]
        most = self.model.config.max_seq_len
        places = [place for place, prompt in enumerate(prompts) if questions[place] and len(prompt) < most]
        answers = self._sampled(
            [prompts[place] for place in places],
            [numbers[place] for place in places],
            derive_seed(seed, "answer"),
            self.tokenizer.stop_ids,
        )
        by_place = dict(zip(places, answers, strict=True))
        return [{"question": question, "answer": by_place.get(place, "")} for place, question in enumerate(questions)]

    def _sampled(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        seed: int,
        stops: tuple[int, ...],
        *,
        may_break: bool = False,
    ) -> list[str]:
        """Samples a continuation of each prompt. may_break: keep a text that has no end within the limit, as long
        documents are cut at the end of a row; otherwise it is "", because an answer that breaks off teaches to break
        off.
        """
        room = [min(MOST_TOKENS, self.model.config.max_seq_len - len(prompt)) for prompt in prompts]
        params = [
            SamplingParams(max_tokens=most, seed=derive_seed(seed, number), stop_ids=stops)
            for number, most in zip(numbers, room, strict=True)
        ]
        found = generate(self.model, prompts, params) if prompts else []
        return [self._text(one) if may_break or one.finish_reason == "stop" else "" for one in found]

    def _text(self, completion: Completion) -> str:
        is_ended = completion.finish_reason == "stop"
        return self.tokenizer.decode(completion.token_ids[: -1 if is_ended else None]).strip()


def _document(form: str, number: int, content: dict[str, str]) -> Document:
    return Document(
        id=f"self/{form}/{number}",
        text="\n\n".join(content.values()),
        kind="qa" if form == "conversations" else "prose",
        split="train",
        source=OWN_AUTHOR,
        meta={AUTHOR_FIELD: OWN_AUTHOR} | (content if form == "conversations" else {}),
    )
