"""Encodes texts as token ids and decodes them: byte-level BPE in the Hugging Face layout.

A tokenizer folder has `tokenizer.json`, `tokenizer_config.json` (special tokens, chat template) and
`special_tokens_map.json`; `transformers.AutoTokenizer` loads it and gives the same ids. A Hugging Face tokenizer of any
kind can be loaded in its place. Ids are decoded one at a time, so that a client never receives half a character.

Encoding is several times faster with `tiktoken`, for tokenizers that mean the same in both libraries: BPE without
dropout or byte fallback, byte-level alphabet, one splitting pattern, no normalizer, ids of merged tokens in the order
of the merges.
"""

import codecs
import heapq
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import word_for_none
from modelwright.core.errors import ArtifactError, ConfigError, DataError
from modelwright.core.resources import num_usable_cores
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Message
from modelwright.data.tokenizer.chat import DEFAULT_TEMPLATE, IMAGE_MARK, ChatLoss, ChatTemplate, TextSpan, unshield

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
_FILES = ("tokenizer.json", "tokenizer_config.json")
_FURTHER_FILES = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "tokenizer.model",
)  # fmt: skip
"""Other files of a tokenizer of Hugging Face, which are only copied, except for the chat template."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Settings of a byte-level BPE."""

    vocab_size: int = 12_288
    """Number of tokens, special ones included; fewer if the text is too small for that."""
    min_frequency: int = 2
    """Minimum occurrences of a pair that is merged."""
    sample_bytes: int = 12_000_000
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
    """Encodes and decodes. Special tokens in a text stay plain text unless the chat template inserted them."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        template: str = DEFAULT_TEMPLATE,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """files: contents of a loaded tokenizer's files, which `save` writes again unchanged."""
        self._library = library
        self._definition = json.loads(library.to_str())
        self._fast = fast_encoding(library.to_str())
        # Without added tokens, so that special tokens in a text are plain text.
        plain = {**self._definition, "added_tokens": [], "post_processor": None}
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._added = {entry["content"]: entry["id"] for entry in self._definition["added_tokens"]}
        added = library.get_added_tokens_decoder()
        self._special = {token for token, number in self._added.items() if added[number].special}
        # Longest first, because a token may begin with another; without any, the pattern matches nothing.
        self._cut = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._bytes = token_bytes(self._definition) if is_byte_level(self._definition) else None
        self.special_tokens = special_tokens
        self._files = files
        self.chat_template = ChatTemplate(template, special_tokens, sorted(self._added, key=len, reverse=True))
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
    def load(cls, folder: Path) -> "Tokenizer":
        """Loads a folder in the Hugging Face layout. Raises `ArtifactError` when a file is missing or damaged."""
        paths = [folder / name for name in _FILES]
        for path in paths:
            if not path.is_file():
                raise ArtifactError(f"{path}: is missing; give a folder with {' and '.join(_FILES)} (a fast tokenizer)")
        try:
            library = tokenizers.Tokenizer.from_file(str(paths[0]))
            settings = json.loads(paths[1].read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{folder}: its tokenizer cannot be read ({error})") from None
        special_tokens: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = settings.get(name)
            if content := token["content"] if isinstance(token, dict) else token:  # a string, or an object
                special_tokens[name] = content
        library.no_padding()
        library.no_truncation()
        files = {name: (folder / name).read_bytes() for name in (*_FILES, *_FURTHER_FILES) if (folder / name).is_file()}
        if "chat_template.jinja" in files:
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        else:
            template = settings.get("chat_template") or DEFAULT_TEMPLATE
            if isinstance(template, list):  # several templates with names
                templates = {entry["name"]: entry["template"] for entry in template}
                template = templates.get("default", next(iter(templates.values())))
        # A saved copy must have the template that this tokenizer uses.
        if not (settings.get("chat_template") or "chat_template.jinja" in files):
            settings["chat_template"] = template
            files["tokenizer_config.json"] = json.dumps(settings, indent=1, ensure_ascii=False).encode("utf-8")
        return cls(library, special_tokens=special_tokens, template=template, files=files)

    def save(self, folder: Path, *, max_length: int | None = None) -> None:
        """Writes a folder for `load` and `transformers.AutoTokenizer`. max_length: the model's, in tokens. The files of
        a loaded tokenizer stay unchanged; one without a chat template gets the default one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._files:
            for name, content in self._files.items():
                write_atomic(folder / name, content)
            return
        settings: dict[str, Any] = {
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
    def end_id(self) -> int:
        """First special token after an answer in the chat template (ChatML: `<|im_end|>`), or the end-of-text token."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            spoken = "".join(span.text for span in self.chat_template.spans(turns) if span.spoken)
        except DataError:  # a template for other conversations than this one
            return self.eos_id
        match = self._cut.search(spoken, spoken.find(_PROBE) + len(_PROBE))
        return self._added[match.group()] if match else self.eos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which generation stops."""
        return tuple(dict.fromkeys((self.end_id, self.eos_id)))

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
        if self._fast is not None and not (len(text) > LONG_SPACE and _LONG_SPACE.search(text)):
            return self._fast.encode_ordinary(text)
        # a batch of one: unlike `encode`, it lets other threads work meanwhile
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_document(self, text: str) -> np.ndarray:
        """Encodes a whole document as [T] int64: begin token (if the tokenizer has one), text, end token."""
        begin = [] if self.bos_id is None else [self.bos_id]
        return np.array([*begin, *self.encode(text), self.eos_id], dtype=np.int64)

    def encode_documents(self, texts: Iterable[str], *, num_threads: int = 0) -> Iterator[np.ndarray]:
        """Yields `encode_document` of many texts, in order, with `num_threads` threads (0: one per usable core)."""
        with ThreadPoolExecutor(num_threads or num_usable_cores()) as pool:
            # In blocks, because `map` would read all texts at once.
            texts = iter(texts)
            while block := list(islice(texts, 1024)):
                yield from pool.map(self.encode_document, block, chunksize=32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Decodes ids, with replacement characters for invalid UTF-8. Raises `ValueError` for an unknown id."""
        stream = self.stream(skip_special=skip_special)
        return "".join([*(stream.step(int(i)) for i in ids), stream.finish()])

    def stream(self, *, skip_special: bool = True) -> "TextStream":
        """Returns a decoder that takes one id at a time and returns whole characters only."""
        added = {i: "" if skip_special and token in self._special else token for token, i in self._added.items()}
        if self._bytes is not None:
            return ByteStream(self._bytes, added)
        return LibraryStream(self._library, skip_special)

    def render_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), add_generation_prompt: bool
    ) -> str:
        """Renders a conversation as the text that the model sees. Raises `DataError` if the template rejects it."""
        template = self.chat_template
        return unshield(template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def encode_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), image_text: str = ""
    ) -> list[int]:
        """Encodes a conversation up to the beginning of the assistant's turn. image_text: text of an image, its special
        token once for each patch. Raises `DataError` if the template rejects the conversation, or omits an image.
        """
        rendered = self.chat_template.render(messages, tools=tools, add_generation_prompt=True)
        _require_images(messages, rendered)
        return self.encode_rendered(rendered, image_text)

    def question_bounds(self) -> tuple[list[int], int]:
        """Returns the inputs for writing a question with a model: the ids of a conversation up to the first words of
        its user, and the special token after them in the chat template, or the end-of-text token without one.
        """
        rendered = self.chat_template.render([{"role": "user", "content": _PROBE}], add_generation_prompt=False)
        before, _, after = rendered.partition(_PROBE)
        match = self._cut.search(after)
        return self.encode_rendered(before), self._added[match.group()] if match else self.eos_id

    def encode_chat(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation as ids [T] int64 and a loss mask [T] uint8: 1 for every answer of the assistant up to
        the token at which generation stops. The rest of the rendered turn (the line end of ChatML) is never generated,
        so it is not learned. The ids up to an answer are those of `encode_prompt` for the turns before it.
        """
        return _encode_spans(self, self.chat_template.spans(messages), ends_at_stop=True)

    def encode_training_chats(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        loss: ChatLoss = "assistant",
        image_text: str = "",
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes the texts to learn a conversation from as ids and loss masks, like `encode_chat`: one text, or one
        for each answer, whichever the chat template allows (`ChatTemplate.training_spans`). If the template marks
        answers, the marks alone decide; with `loss` `all` a text is learned up to its last answer. image_text: as in
        `encode_prompt`, whose errors it raises.
        """
        template = self.chat_template
        texts = template.training_spans(messages, tools=tools, loss=loss)
        for spans in texts:
            _require_images(messages, "".join(span.text for span in spans))
        chats = [
            _encode_spans(self, spans, ends_at_stop=not template.marks_answers, image_text=image_text)
            for spans in texts
        ]
        if loss == "all":
            for _, mask in chats:
                mask[: mask.nonzero()[0].max(initial=-1) + 1] = 1
        return chats

    def encode_completion(
        self, messages: Sequence[Message], first: int, *, tools: Sequence[Any] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a conversation as ids and loss mask, like `encode_chat`, of which only the answers from turn number
        `first` on are learned; the turns before it are the prompt.
        """
        spans = self.chat_template.completion_spans(messages, first, tools=tools)
        return _encode_spans(self, spans, ends_at_stop=True)

    def token_text(self, token_id: int) -> str:
        """Returns a token as text for display; incomplete characters become replacement characters."""
        return self.decode([token_id], skip_special=False)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a special token, or None."""
        return self._added.get(token)

    def encode_rendered(self, text: str, image_text: str = "") -> list[int]:
        """Encodes a rendered template: special tokens are recognized, shielded ones are plain text."""
        text = text.replace(IMAGE_MARK, image_text)
        ids: list[int] = []
        at = 0
        for match in self._cut.finditer(text):
            ids += self.encode(unshield(text[at : match.start()]))
            ids.append(self._added[match.group()])
            at = match.end()
        return ids + self.encode(unshield(text[at:]))


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


def _encode_spans(
    tokenizer: Tokenizer, spans: Sequence[TextSpan], *, ends_at_stop: bool, image_text: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """ends_at_stop: an answer ends with the first token that stops generation, that token included."""
    ids: list[int] = []
    mask: list[int] = []
    for span in spans:
        part = tokenizer.encode_rendered(span.text, image_text)
        ends = (place + 1 for place, token in enumerate(part) if ends_at_stop and token in tokenizer.stop_ids)
        num_spoken = next(ends, len(part))
        num_learned = num_spoken if span.spoken else 0
        ids += part
        mask += [1] * num_learned + [0] * (len(part) - num_learned)
    return np.array(ids, dtype=np.int64), np.array(mask, dtype=np.uint8)


def is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Returns True if tokens are spelled in the byte-level alphabet, so that each has fixed bytes."""
    decoder = definition.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return any(step.get("type") == "ByteLevel" for step in steps)


def token_bytes(definition: Mapping[str, Any]) -> dict[int, bytes]:
    """Returns the bytes of each token of a byte-level vocabulary, except added tokens."""
    # GPT-2's alphabet (Radford et al. 2019, `encoder.py`): printable characters are themselves, others follow at 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    added = {entry["content"] for entry in definition.get("added_tokens", ())}
    vocab = definition["model"]["vocab"]
    return {i: bytes(byte_of[c] for c in token) for token, i in vocab.items() if token not in added}


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
    ranks = {spelled: i for i, spelled in token_bytes(definition).items()}
    if not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    # tiktoken merges by id, `tokenizers` by rank: the merges must create each token once, in the order of ids.
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = [model["vocab"].get(left + right, -1) for left, right in pairs]
    if not all(a < b for a, b in pairwise(made)):
        return None
    return tiktoken.Encoding(name="modelwright", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


class ByteStream:
    """Decoder of byte-level vocabularies, one id at a time: the joined texts of all steps and of `finish` are the text
    of all ids. token_bytes: by id; added: texts of added tokens, which are plain text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], added: Mapping[int, str]) -> None:
        self._bytes = token_bytes
        self._added = added
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        """Returns the text that this id completes; may be empty. Raises `ValueError` for an unknown id."""
        if token_id in self._added:
            text = self._added[token_id]
            return self.finish() + text if text else ""
        if token_id not in self._bytes:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        return self._decoder.decode(self._bytes[token_id])

    def finish(self) -> str:
        """Returns the rest: a replacement character if the ids end within a character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()  # an added token in the midst of a stream calls this, too
        return text


class LibraryStream:
    """Does `ByteStream` for any other vocabulary, by `tokenizers`' own stream decoder."""

    def __init__(self, library: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._library = library
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._text = ""

    def step(self, token_id: int) -> str:
        if self._library.id_to_token(token_id) is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        self._ids.append(token_id)
        text = self._stream.step(self._library, token_id) or ""
        self._text += text
        return text

    def finish(self) -> str:
        # The library's stream holds back an incomplete character; a decoder that rewrites earlier text has no rest.
        whole = self._library.decode(self._ids, skip_special_tokens=self._skip_special)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


TextStream = ByteStream | LibraryStream
