"""Encodes texts as token ids and decodes them: byte-level BPE in the Hugging Face layout.

A tokenizer folder has `tokenizer.json`, `tokenizer_config.json` (special tokens, chat template) and
`special_tokens_map.json`; `transformers.AutoTokenizer` loads it and gives the same ids. A Hugging Face tokenizer of any
kind can be loaded in its place.

Encoding is several times faster with `tiktoken`, for tokenizers that mean the same in both libraries: BPE without
dropout or byte fallback, byte-level alphabet, one splitting pattern, no normalizer, ids of merged tokens in the order
of the merges.
"""

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.core.config import ConfigError, DataError, constant, derive_seed, word_for_none
from modelwright.core.resources import num_usable_cores
from modelwright.data.document import Message, says_something
from modelwright.data.tokenizer.chat import (
    DEFAULT_TEMPLATE,
    IMAGE_MARK,
    SHIELD,
    ChatLoss,
    ChatTemplate,
    Rendering,
    answers_to_learn,
    any_of,
)
from modelwright.data.tokenizer.decode import ByteStream, LibraryStream, TextStream, is_byte_level, token_bytes

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Built-in pattern of `tokenizers`' `ByteLevel` pre-tokenizer."""

BOS, EOS, END, PAD = "<|bos|>", "<|eos|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>")

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the places where words may be cut, from Llama 3's `tokenizer.json`."""
LONG_SPACE = 5_000
"""Run of blanks at which tiktoken is avoided: its pattern matching runs out of stack and panics (seen at 10^6)."""
_PROBE = "probe"
"""Content of a turn that is rendered to find the text of the chat template around it."""
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{LONG_SPACE}}}")
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_FILES = ("tokenizer.json", "tokenizer_config.json")
GENERATION = "generation_config.json"
_FURTHER_FILES = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "tokenizer.model", _TOOL_TEMPLATE,
)  # fmt: skip
"""Other files of a tokenizer of Hugging Face, which are only copied, except for the chat template."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Settings of a byte-level BPE."""

    vocab_size: int = 12_288
    """Number of tokens, special ones included; fewer if the text is too small for that."""
    min_frequency: int = constant(2)
    """Minimum occurrences of a pair that is merged."""
    sample_bytes: int = constant(12_000_000)
    """Bytes of text to learn from."""
    special_tokens: tuple[str, ...] = field(default=(), metadata=word_for_none())
    """Further special tokens, such as the `<|image|>` that represents a patch of an image."""

    def __post_init__(self) -> None:
        named = [*SPECIAL_TOKENS, *self.special_tokens]
        if len(set(named)) < len(named) or not all(len(token) > 1 for token in self.special_tokens):
            raise ConfigError(
                f"special_tokens: each must be a new text of several characters, got {', '.join(self.special_tokens)}"
            )
        smallest = 256 + len(named)
        if self.vocab_size < smallest:
            raise ConfigError(f"vocab_size: {self.vocab_size} is too small for bytes and special tokens ({smallest})")
        if self.min_frequency < 1:
            raise ConfigError(f"min_frequency: {self.min_frequency} is not positive")
        if self.sample_bytes < 1:
            raise ConfigError(f"sample_bytes: {self.sample_bytes} is not positive")


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> "Tokenizer":
    """Learns a byte-level BPE from a sample of the texts.

    The sample depends on the texts alone, not on their order. The result depends on neither threads nor the hash seed.
    Raises `DataError` without any text.
    """
    # The texts with the smallest hashes that fit, at least one: a heap has the largest hash on top, which leaves first.
    heap: list[tuple[int, str]] = []
    size = 0
    for text in texts:
        heapq.heappush(heap, (-derive_seed(0, "tokenizer", text), text))
        size += len(text.encode("utf-8"))
        while size > config.sample_bytes and len(heap) > 1:
            size -= len(heapq.heappop(heap)[1].encode("utf-8"))
    sample = [text for _, text in sorted(heap, reverse=True)]
    if not sample:
        raise DataError("the tokenizer needs text to train on; check the counts of the clean stage")
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    # The initial alphabet has all 256 bytes, so that any text can be encoded.
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *config.special_tokens)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(sample, trainer)
    bos_id = trained.token_to_id(BOS)
    trained.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos_id)]
    )
    return Tokenizer(trained, special_tokens={"bos_token": BOS, "eos_token": EOS, "pad_token": PAD})


class Tokenizer:
    """Encodes and decodes texts; `chat` encodes conversations. Special tokens in a text stay plain text. Added tokens
    that are not special are words of the vocabulary: wherever their text occurs, they are one id.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        template: str = DEFAULT_TEMPLATE,
        tool_template: str = "",
        generation_stops: Sequence[int] = (),
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """tool_template: template for conversations with tools, where it is another one. generation_stops: the
        `eos_token_id` of the `generation_config.json`. files: contents of a loaded tokenizer's files, which `save`
        writes again unchanged.
        """
        self._library = library
        self._definition = json.loads(library.to_str())
        self._fast = fast_encoding(library.to_str())
        self._added = {entry["content"]: entry["id"] for entry in self._definition["added_tokens"]}
        self._special = {entry["content"] for entry in self._definition["added_tokens"] if entry["special"]}
        # The fast encoding knows no added tokens. None without any: a search for nothing takes time, too.
        words = self._added.keys() - self._special
        self._words = any_of(words) if words else None
        # White space that is an added token (Gemma's line breaks) marks no place in a template.
        self._cut = any_of(token for token in self._added if token.strip())
        self._plain = _without_special(self._definition, self._special)
        self._bytes = token_bytes(self._definition) if is_byte_level(self._definition) else None
        self.special_tokens = special_tokens
        self._generation_stops = tuple(generation_stops)
        self._files = files
        self.chat_template = ChatTemplate(template, special_tokens, sorted(self._special))
        self._tool_template = ChatTemplate(tool_template or template, special_tokens, sorted(self._special))
        # Ids may have gaps.
        self.vocab_size: int = max(library.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: Any
        self.eos_id: Any
        self.bos_id, self.eos_id = (
            library.token_to_id(special_tokens[name]) if name in special_tokens else None
            for name in ("bos_token", "eos_token")
        )
        if self.eos_id is None:
            raise ArtifactError("the tokenizer lacks an eos_token; add one to its tokenizer_config.json")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Loads a folder in the Hugging Face layout. Raises `ArtifactError` when a file is missing or damaged."""
        paths = [folder / name for name in _FILES]
        for path in paths:
            if not path.is_file():
                raise ArtifactError(f"{path}: is missing; give a folder with {' and '.join(_FILES)} (a fast tokenizer)")
        generation = folder / GENERATION
        try:
            library = tokenizers.Tokenizer.from_file(str(paths[0]))
            settings = json.loads(paths[1].read_text(encoding="utf-8"))
            generated: Any = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{folder}: its tokenizer cannot be read ({error})") from None
        stops = generated.get("eos_token_id") if isinstance(generated, dict) else None
        stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
        if not all(type(stop) is int and stop >= 0 for stop in stops):
            raise ArtifactError(f"{generation}: eos_token_id must be a token id or a list of them")
        # `bos_token`, `eos_token` and any other one that a template may name: a string, or an object.
        named = ((name, token) for name, token in settings.items() if name.endswith("_token") and token)
        contents = ((name, token.get("content") if isinstance(token, dict) else token) for name, token in named)
        special_tokens = {name: content for name, content in contents if isinstance(content, str)}
        library.no_padding()
        library.no_truncation()
        files = {name: (folder / name).read_bytes() for name in (*_FILES, *_FURTHER_FILES) if (folder / name).is_file()}
        template, tool_template = settings.get("chat_template") or DEFAULT_TEMPLATE, ""
        if isinstance(template, list):  # several templates with names
            templates = {entry["name"]: entry["template"] for entry in template}
            template = templates.get("default", next(iter(templates.values())))
            tool_template = templates.get("tool_use", "")
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode("utf-8")
        if _TOOL_TEMPLATE in files:
            tool_template = files[_TOOL_TEMPLATE].decode("utf-8")
        # A saved copy must have the template that this tokenizer uses.
        if not (settings.get("chat_template") or "chat_template.jinja" in files):
            settings["chat_template"] = template
            files["tokenizer_config.json"] = json.dumps(settings, indent=1, ensure_ascii=False).encode("utf-8")
        return cls(
            library, special_tokens=special_tokens, template=template, tool_template=tool_template,
            generation_stops=stops, files=files,
        )  # fmt: skip

    def save(self, folder: Path, *, max_length: int | None = None) -> None:
        """Writes a folder for `load` and `transformers.AutoTokenizer`. max_length: the model's, in tokens. The files of
        a loaded tokenizer stay unchanged; one without a chat template gets the default one. The `eos_token_id` of a
        `generation_config.json` there becomes `stop_ids`, so that every copy of a model stops where this one does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        generation = folder / GENERATION
        if self._generation_stops or generation.is_file():
            settings = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
            write_atomic(generation, json.dumps({**settings, "eos_token_id": [*self.stop_ids]}, indent=2) + "\n")
        if self._files:
            for name, content in self._files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_atomic(folder / name, content)
            return
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
            "added_tokens_decoder": {
                str(entry["id"]): {k: v for k, v in entry.items() if k != "id"}
                for entry in self._definition["added_tokens"]
            },
            "chat_template": self.chat_template.source,
            "clean_up_tokenization_spaces": False,
        }
        if max_length is not None:
            settings["model_max_length"] = max_length
        write_atomic(folder / "tokenizer.json", self._library.to_str(pretty=True))
        write_atomic(folder / "tokenizer_config.json", json.dumps(settings, indent=1, ensure_ascii=False))
        write_atomic(folder / "special_tokens_map.json", json.dumps(self.special_tokens, indent=1))

    @cached_property
    def chat(self) -> "Conversations":
        """Encodes conversations."""
        return Conversations(self)

    @cached_property
    def end_id(self) -> int:
        """First added token after an answer in the chat template (ChatML: `<|im_end|>`), or the end-of-text token."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            rendered = self.chat_template.render(turns, add_generation_prompt=False)
        except DataError:  # a template for other conversations than this one
            return self.eos_id
        match = self._cut.search(rendered, rendered.find(_PROBE) + len(_PROBE))
        return self._added[match.group()] if match else self.eos_id

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which generation stops: the chat template's end of a turn, first, then the tokenizer's end of text
        and those of `generation_config.json`. Each is a token of the vocabulary.
        """
        stops = (self.end_id, self.eos_id, *self._generation_stops)
        return tuple(dict.fromkeys(stop for stop in stops if self._library.id_to_token(stop) is not None))

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Finds an end token in a rendered text. A stop that is an ordinary token (a line break) ends no turn there."""
        return any_of(token for token, number in self._added.items() if number in self.stop_ids)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens, such as `<|im_end|>`, and of those that are not special, such as `<think>`."""
        return frozenset(self._added.values())

    @cached_property
    def begin_ids(self) -> list[int]:
        """Ids that `transformers` puts before a text: the begin token, or nothing."""
        marked, plain = (self._library.encode("x", add_special_tokens=adds).ids for adds in (True, False))
        places = range(len(marked) - len(plain) + 1)
        begin = marked[: next((place for place in places if marked[place : place + len(plain)] == plain), 0)]
        settings = json.loads(self._files.get("tokenizer_config.json", b"{}"))
        if not begin and self.bos_id is not None and settings.get("add_bos_token", False):
            return [self.bos_id]
        return begin

    @property
    def is_fast(self) -> bool:
        """True if encoding uses `tiktoken`."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        """Encodes a plain text: no special token is added, and none is recognized in the text."""
        is_odd = len(text) > LONG_SPACE and _LONG_SPACE.search(text)
        if self._fast is not None and not is_odd and not (self._words and self._words.search(text)):
            return self._fast.encode_ordinary(text)
        # a batch of one: unlike `encode`, it lets other threads work meanwhile
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_document(self, text: str) -> np.ndarray:
        """Encodes a whole document as [T] int64: begin token (if the tokenizer adds one), text, end token."""
        return np.array([*self.begin_ids, *self.encode(text), self.eos_id], dtype=np.int64)

    def encode_documents(self, texts: Iterable[str], *, num_threads: int = 0) -> Iterator[np.ndarray]:
        """Yields `encode_document` of many texts, in order, with `num_threads` threads (0: one per usable core)."""
        with ThreadPoolExecutor(num_threads or num_usable_cores()) as pool:
            # In blocks, because `map` would read all texts at once.
            texts = iter(texts)
            while block := list(islice(texts, 1024)):
                yield from pool.map(self.encode_document, block, chunksize=32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Decodes ids as `tokenizers` does, with replacement characters for invalid UTF-8. Raises `ValueError` for an
        unknown id.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*(stream.step(int(i)) for i in ids), stream.finish()])

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Returns a decoder that takes one id at a time and returns whole characters only."""
        if self._bytes is not None:
            skipped = {self._added[token] for token in self._special} if skip_special else set[int]()
            return ByteStream(self._bytes, skipped)
        return LibraryStream(self._library, self._definition, self._special if skip_special else ())

    def token_text(self, token_id: int) -> str:
        """Returns a token as text for display; incomplete characters become replacement characters."""
        return self.decode([token_id], skip_special=False)

    def id_of(self, token: str) -> int | None:
        """Returns the id of an added token, or None."""
        return self._added.get(token)


@dataclass(frozen=True, eq=False)
class Conversations:
    """Renders conversations by a tokenizer's chat template, and encodes them for training and serving alike. Special
    tokens in their texts stay plain text: only the template can insert them. Separate from `Tokenizer`, because what
    reads plain text has no use for templates and masks.
    """

    tokenizer: Tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Renders a conversation as the text that `encode_rendered` takes, for training and serving alike. variables:
        further variables of the template, such as `enable_thinking`. Raises `DataError` if the template rejects it.
        """
        template = self.tokenizer._tool_template if tools else self.tokenizer.chat_template
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)

    def encode_rendered(self, text: str, image_text: str = "") -> list[int]:
        """Encodes a rendered conversation as `transformers` does: special tokens are recognized, with the white space
        that they take, and shielded ones are plain text. image_text: text of an image, its special token once for each
        patch.
        """
        return self._encoded(text.replace(IMAGE_MARK, image_text))[0]

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a rendered text, and the characters `[start, end)` of each."""
        library, ids_of = (self.tokenizer._library, {}) if SHIELD not in text else self._unshielding
        # A batch of one lets other threads work meanwhile.
        encoding = library.encode_batch([text], add_special_tokens=False)[0]
        return [ids_of.get(token, token) for token in encoding.ids] if ids_of else encoding.ids, encoding.offsets

    @cached_property
    def _unshielding(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The library without the shields: they are removed once special tokens are recognized. Also the ids of added
        tokens by the ids that they have in this copy of the library.
        """
        removes = {"type": "Replace", "pattern": {"String": SHIELD}, "content": ""}
        own = self.tokenizer._definition
        steps = [removes, *([own["normalizer"]] if own["normalizer"] else [])]
        added = [
            # Before the text is normalized, because the shields are then gone.
            {**entry, "normalized": entry["normalized"] and not entry["special"]}
            for entry in own["added_tokens"]
        ]
        model = _without_pieces(own["model"], self.tokenizer._special)
        normalizer = {"type": "Sequence", "normalizers": steps}
        definition = {**own, "model": model, "added_tokens": added, "normalizer": normalizer}
        library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        numbers = [(library.token_to_id(token), number) for token, number in self.tokenizer._added.items()]
        moved = any(one != other for one, other in numbers)
        return library, {one: number for one, number in numbers if one is not None} if moved else {}

    def encode_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        image_text: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Encodes a conversation up to the beginning of the assistant's turn. image_text: as in `encode_rendered`;
        variables: as in `render`. Raises `DataError` if the template rejects the conversation, or omits an image.
        """
        # not by `render`, because a client may name a variable like one of its parameters
        template = self.tokenizer._tool_template if tools else self.tokenizer.chat_template
        rendered = template.render(messages, tools=tools, add_generation_prompt=True, variables=variables)
        _require_images(messages, rendered)
        return self.encode_rendered(rendered, image_text)

    def question_bounds(self) -> tuple[list[int], int]:
        """Returns the inputs for writing a question with a model: the ids of a conversation up to the first words of
        its user, and the special token after them in the chat template, or the end-of-text token without one.
        """
        rendered = self.render([{"role": "user", "content": _PROBE}], add_generation_prompt=False)
        before, _, after = rendered.partition(_PROBE)
        match = self.tokenizer._cut.search(after)
        return self.encode_rendered(before), self.tokenizer._added[match.group()] if match else self.tokenizer.eos_id

    def encode_chat(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation as ids [T] int64 and a loss mask [T] uint8: 1 for every answer of the assistant up to
        the token at which generation stops. The rest of the rendered turn (the line end of ChatML) is never generated,
        so it is not learned. If the template renders earlier turns differently once later ones follow, the mask has
        only the last answers, whose prompt is that of `encode_prompt` for the turns before them.
        """
        answers = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
        rendering = self.tokenizer.chat_template.renderings(messages, answers, self.tokenizer._ends)[-1]
        whole = self.render(messages, add_generation_prompt=False)
        end = rendering.learned[-1][1] if rendering.learned else 0
        if whole.startswith(rendering.text[:end]):  # with the turns after the last answer
            rendering = replace(rendering, text=whole)
        return self._encode_rendering(rendering)

    def encode_training_chats(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        loss: ChatLoss = "assistant",
        image_text: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes the texts to learn a conversation from as ids [T] int64 and loss masks [T] uint8: one text, or
        several, whichever the chat template allows (`ChatTemplate.renderings`). The ids are those of `transformers` for
        the conversation up to the last learned answer. If the template marks answers, the marks decide, as in
        `transformers`; otherwise an answer is learned up to its end token. An answer without an end token gets one.

        loss: `last_answer` and `all` learn from the last text alone, `all` up to its last answer. image_text,
        variables: as in `encode_prompt`, whose errors it raises.
        """
        template = self.tokenizer._tool_template if tools else self.tokenizer.chat_template
        has_thoughts = any((turn.get("reasoning_content") or "").strip() for turn in messages)
        if has_thoughts and not template.takes_reasoning:
            raise DataError(
                "the chat template has no place for reasoning_content, which this conversation has; use a template "
                "that has one, or leave the field out (--data.ignore reasoning_content)"
            )
        renderings = template.renderings(
            messages, answers_to_learn(messages), self.tokenizer._ends, tools=tools, variables=variables, use_marks=True
        )
        if loss != "assistant":
            renderings = renderings[-1:]
        if loss == "last_answer":
            renderings = [replace(one, learned=one.learned[-1:]) for one in renderings]
        chats = [self._encode_rendering(one, image_text, messages) for one in renderings]
        if loss == "all":
            for _, mask in chats:
                mask[: mask.nonzero()[0].max(initial=-1) + 1] = 1
        return chats

    def encode_completion(
        self,
        messages: Sequence[Message],
        first: int,
        *,
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation as ids and loss mask, like `encode_chat`, of which only the answers from turn number
        `first` on are learned; the turns before it are the prompt. Of several answers only the last ones are learned if
        the template renders earlier turns differently once later ones follow.
        """
        template = self.tokenizer._tool_template if tools else self.tokenizer.chat_template
        # `train: False` is about imitation; a preference compares answers.
        turns = [
            number
            for number in range(first, len(messages))
            if messages[number]["role"] == "assistant" and says_something(messages[number])
        ]
        renderings = template.renderings(messages, turns, self.tokenizer._ends, tools=tools, variables=variables)
        return self._encode_rendering(renderings[-1])

    def _encode_rendering(
        self, rendering: Rendering, image_text: str = "", messages: Sequence[Message] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids and the loss mask of a rendering; messages: those whose images it must have."""
        _require_images(messages, rendering.text)
        growth, bounds = len(image_text) - 1, [place for one in rendering.learned for place in one]
        places = [place + growth * rendering.text[:place].count(IMAGE_MARK) for place in bounds]
        text = rendering.text.replace(IMAGE_MARK, image_text)
        encoded, offsets = self._encoded(text)
        ids, (starts, ends) = np.array(encoded, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in zip(places[::2], places[1::2], strict=True):
            # As in `transformers`, a token is learned if a part of it is.
            is_learned = (starts < end) & (ends > start)
            if not rendering.is_marked:
                # But no token of the prompt that takes the white space after it, such as Phi-3's `<|assistant|>`.
                is_learned &= (starts >= start) | ~np.isin(ids, [*self.tokenizer._added.values()])
            mask[is_learned] = 1
        if mask.any() and not self.tokenizer._ends.search(text, places[-2], places[-1]):
            last = int(mask.nonzero()[0][-1]) + 1
            ids, mask = np.append(ids[:last], self.tokenizer.end_id), np.append(mask[:last], np.uint8(1))
        return ids, mask


def _without_special(definition: Mapping[str, Any], special: Set[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer for plain text, in which special tokens are text like any other."""
    in_model = {token for token, _ in _pieces(definition["model"])} & special
    model = _without_pieces(definition["model"], special)
    # A special token without its piece would take an id of its own and move those of the tokens after it.
    moved = in_model - {token for token, _ in _pieces(model)}
    added = [entry for entry in definition["added_tokens"] if entry["content"] not in moved]
    plain = {**definition, "model": model, "added_tokens": added, "post_processor": None}
    library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    library.encode_special_tokens = True
    return library


def _pieces(model: Mapping[str, Any]) -> list[tuple[str, Any]]:
    vocab = model["vocab"]
    return [*vocab.items()] if isinstance(vocab, dict) else [tuple(one) for one in vocab]


def _without_pieces(model: Mapping[str, Any], special: Set[str]) -> Mapping[str, Any]:
    """Returns the model of a `tokenizer.json` without special tokens among its words, where it could make one from
    plain text: Unigram finds them like any piece, and models of words look a whole word up. BPE makes merges only.
    """
    if model["type"] == "BPE":
        return model
    hidden = special - {model.get("unk_token")}
    named = enumerate(_pieces(model))
    pieces = [(f"{SHIELD}{number}" if token in hidden else token, one) for number, (token, one) in named]
    return {**model, "vocab": dict(pieces) if isinstance(model["vocab"], dict) else pieces}


def tokenizer_difference(tokenizer: Tokenizer, other: Tokenizer) -> str:
    """Returns the first difference in the meaning of ids or in the encoding of text, such as `'ab' is token 3 here and
    token 4 there`; "" if both give the same ids for every text.
    """
    own, others = (one._library.get_vocab(with_added_tokens=True) for one in (tokenizer, other))
    for token in sorted(own.keys() | others.keys()):
        if own.get(token) != others.get(token):
            places = [f"token {ids[token]}" if token in ids else "no token" for ids in (own, others)]
            return f"{token!r} is {places[0]} here and {places[1]} there"
    parts = ("normalizer", "pre_tokenizer", "model", "added_tokens")
    differing = [part for part in parts if tokenizer._definition.get(part) != other._definition.get(part)]
    return f"{differing[0]} is configured differently" if differing else ""


def _require_images(messages: Sequence[Message], rendered: str) -> None:
    """Raises `DataError` if the rendering of a conversation lacks some of its images."""
    num_images = sum(turn["content"].count(IMAGE_MARK) for turn in messages)
    if rendered.count(IMAGE_MARK) != num_images:
        raise DataError("the chat template leaves out an image of this conversation; use one that keeps user turns")


def fast_encoding(definition_json: str) -> tiktoken.Encoding | None:
    """Returns the encoding of the text of a `tokenizer.json`, without special tokens; None if equality is uncertain."""
    definition = json.loads(definition_json)
    model, steps = definition["model"], definition.get("pre_tokenizer") or {}
    match steps.get("pretokenizers", [steps]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            pattern = GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            pass
        case _:  # another step splits or changes the text
            return None
    if definition.get("normalizer") or not is_byte_level(definition):
        return None
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    if model.get("type") != "BPE" or any(model.get(name) for name in odd):
        return None
    added = {entry["id"] for entry in definition["added_tokens"]}
    ranks = {spelled: i for i, spelled in token_bytes(definition).items() if i not in added}
    if not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    # tiktoken merges by id, `tokenizers` by rank: the merges must create each token once, in the order of ids.
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = [model["vocab"].get(left + right, -1) for left, right in pairs]
    if not all(a < b for a, b in pairwise(made)):
        return None
    return tiktoken.Encoding(name="modelwright", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
