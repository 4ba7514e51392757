"""Loads a model and its tokenizer for serving: a folder in the Hugging Face layout, also of a model that reads images
or of a sequence classifier with one label, which scores texts; or an INT8 folder with a tokenizer. Also incremental
detokenization, fingerprints of weights, and a note on what to expect of a model.

A user's text never becomes a control token: `<|end|>` in a message is encoded as ordinary characters. Only the text of
the chat template itself is encoded with control tokens.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from modelwright.compress.int8 import Int8WeightsConfig, is_int8_folder, load_int8
from modelwright.core.config import DataError, ModelError
from modelwright.data.document import Message
from modelwright.data.tokenizer.decode import TextStream, is_byte_level, token_bytes
from modelwright.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import SCORE, is_sequence_classifier, load_model, load_sequence_classifier
from modelwright.model.vision.llava import is_llava_folder, load_llava
from modelwright.serve.errors import ApiError


class ServedTokenizer:
    """A tokenizer for serving, safe to use from several threads. `bytes_of`: bytes of each token of a byte-level
    vocabulary, else empty; `definition`: text of its `tokenizer.json`; `stop_ids`: tokens that end an answer and are
    never shown; `max_token_bytes`: longest text of one token, 0 if unbounded (the tokenizer normalizes the text, or has
    a token for any unknown word).
    """

    def __init__(
        self, tokenizer: Tokenizer, bytes_of: Mapping[int, bytes], definition: str, *, normalizes: bool = False
    ) -> None:
        self.definition = definition
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.start_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        self.decode, self.stream = tokenizer.decode, tokenizer.stream
        self._bytes_of = bytes_of
        # a normalizer may remove any amount of text, such as repeated spaces
        self.max_token_bytes = 0 if normalizes else max(map(len, bytes_of.values()), default=0)
        control = [tokenizer.id_of(token) for token in SPECIAL_TOKENS]
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *(token for token in control if token is not None)}))

    @classmethod
    def load(cls, folder: Path) -> "ServedTokenizer":
        """Reads a tokenizer folder. Raises `ArtifactError` if it cannot be read."""
        tokenizer = Tokenizer.load(folder)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        definition = json.loads(text)
        bytes_of = token_bytes(definition) if is_byte_level(definition) else {}
        for entry in definition["added_tokens"]:
            if entry["special"]:  # never the token of a text, and shown by name
                bytes_of.pop(entry["id"], None)
        return cls(tokenizer, bytes_of, text, normalizes=bool(definition.get("normalizer")))

    def encode(self, text: str, *, with_begin: bool = True, parse_special: bool = False) -> list[int]:
        """Encodes a prompt for plain completion, in which special tokens are recognized only with `parse_special`."""
        # with the begin token, if the tokenizer adds one, because documents begin with it in training
        begin = self._tokenizer.begin_ids if with_begin else []
        ids = self._tokenizer.chat.encode_rendered(text) if parse_special else self._tokenizer.encode(text)
        # a prompt that writes its begin token itself gets no second one
        return ids if parse_special and begin and ids[: len(begin)] == begin else [*begin, *ids]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        image_text: str = "",
    ) -> list[int]:
        """Encodes a conversation up to the start of the assistant's turn, as training renders it. tools: schemas of
        functions; variables: further variables of the template; image_text: text that represents an image. Raises
        `ApiError` 400 if the template rejects it.
        """
        try:
            return self._tokenizer.chat.encode_prompt(messages, tools=tools, variables=variables, image_text=image_text)
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template shows tools, calls and results."""
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}}
        turns: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{_PROBE}2", "tool_call_id": "abcdefghi", "name": _PROBE},
        ]
        tools = [{"type": "function", "function": function}]
        try:
            shown = self._tokenizer.chat.render(turns, tools=tools, add_generation_prompt=True)
        except DataError:
            return False
        # a template may list the tools and hide the calls, or the reverse
        return shown.count(_PROBE) >= 3 and f"{_PROBE}2" in shown

    @property
    def takes_reasoning(self) -> bool:
        """True if the template has a place for the thoughts of earlier answers."""
        return self._tokenizer.chat_template.takes_reasoning

    @property
    def template(self) -> str:
        """The source of the chat template."""
        return self._tokenizer.chat_template.source

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Ids of the special tokens, which texts of answers omit."""
        added = json.loads(self.definition)["added_tokens"]
        return {entry["content"]: entry["id"] for entry in added if entry["special"]}

    def mark_ids(self, mark: str) -> tuple[int, ...]:
        """Returns the tokens of a mark that templates write, such as `<think>`."""
        return tuple(self._tokenizer.chat.encode_rendered(mark))

    def encode_answer(self, question: str, answer: str) -> list[int]:
        """Encodes a question and its answer, up to the last token of the answer. Raises like `encode_chat`."""
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            ids, mask = self._tokenizer.chat.encode_chat(turns)
        except DataError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        spoken = mask.nonzero()[0]
        return ids[: int(spoken[-1]) + 1 if len(spoken) else len(ids)].tolist()

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token, the name of a control token, or "" for a token that only the model has."""
        return self._tokenizer.token_text(token_id) if token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token: exact for byte-level vocabularies, else its text in UTF-8."""
        return self._bytes_of.get(token_id) or self.token_text(token_id).encode("utf-8")


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability (None for the first token of an echoed prompt, which has nothing before it),
    likeliest alternatives and offset in the text of the answer.
    """

    token_id: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """Final text with its tokens, and the finish reason ("" while the answer continues)."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: str = ""


@dataclass
class IncrementalDetokenizer:
    """Assembles the text of an answer. `stop_texts` end it and are not part of it; as in vLLM, they are not searched in
    the first `min_tokens` tokens. num_shown: number of characters so far, with an echoed prompt.
    """

    stream: TextStream
    stop_texts: tuple[str, ...] = ()
    num_shown: int = 0
    min_tokens: int = 0
    _num_tokens: int = 0
    _held: str = ""
    _pending: list[TokenInfo] = field(default_factory=list)

    def info(self, token_id: int, logprob: float, alternatives: tuple[tuple[int, float], ...]) -> TokenInfo:
        """Returns the next token, with its offset in the text."""
        return TokenInfo(token_id, logprob, alternatives, self.num_shown + len(self._held))

    def push(self, token_id: int, logprob: float, alternatives: tuple[tuple[int, float], ...]) -> Delta:
        """Adds a token. The piece has the finish reason "stop" if it completes a stop string."""
        self._pending.append(self.info(token_id, logprob, alternatives))
        with contextlib.suppress(ValueError):  # a model may have more tokens than its tokenizer, which have no text
            self._held += self.stream.step(token_id)
        self._num_tokens += 1
        if self._num_tokens <= self.min_tokens:
            return self._release(len(self._held), "")
        cut = self._find_stop()
        if cut >= 0:
            self._held = self._held[:cut]
            return self._release(len(self._held), "stop")
        # the longest suffix that may be the beginning of a stop string is held back
        length = min(max((len(text) - 1 for text in self.stop_texts), default=0), len(self._held))
        while length and not any(text.startswith(self._held[-length:]) for text in self.stop_texts):
            length -= 1
        return self._release(len(self._held) - length, "")

    def finish(self, reason: str) -> Delta:
        """Returns the rest of the text when the engine has ended the answer."""
        self._held += self.stream.finish()
        cut = self._find_stop()
        self._held = self._held[:cut] if cut >= 0 else self._held
        return self._release(len(self._held), "stop" if cut >= 0 else reason)

    def _find_stop(self) -> int:
        places = [place for place in (self._held.find(text) for text in self.stop_texts) if place >= 0]
        return min(places, default=-1)

    def _release(self, length: int, reason: str) -> Delta:
        text, self._held = self._held[:length], self._held[length:]
        self.num_shown += length
        ready = [info for info in self._pending if info.offset < self.num_shown]
        self._pending = [info for info in self._pending if info.offset >= self.num_shown]
        return Delta(text, tuple(ready), reason)


SHORT_DIGEST = 12
_PROBE = "probed_function"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The origin of a model, for display: its folder, the stage that wrote it and the SHA-256 over its files. `stage`
    and `digest` are "" for a folder that no stage wrote (downloaded, exported).
    """

    name: str
    folder: Path
    stage: str = ""
    digest: str = ""

    def describe(self) -> str:
        """Returns a text such as `sft of tiny (runs/tiny/sft/artifact, sha256 0123456789ab)`."""
        if not self.digest:
            return f"{self.name} ({self.folder}, without a manifest, so its files are not verified)"
        return f"{self.stage} of {self.name} ({self.folder}, sha256 {self.digest[:SHORT_DIGEST]})"


def load_folder(folder: Path, int8: Int8WeightsConfig) -> tuple[Decoder, ServedTokenizer]:
    """Loads a model and its tokenizer. Raises `ModelError` if files are missing or do not match."""
    require_folder(folder)
    # the more special layouts first: each of them is in the Hugging Face layout as well
    if is_int8_folder(folder):
        model = load_int8(folder, int8)
    elif is_llava_folder(folder):
        model = load_llava(folder)
    elif is_sequence_classifier(folder):
        model = load_sequence_classifier(folder, head=SCORE)
    else:
        model = load_model(folder)
    tokenizer = ServedTokenizer.load(folder)
    # fewer tokens are normal, because models pad their vocabulary
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}; "
            "they do not match"
        )
    return model.eval(), tokenizer


def require_folder(folder: Path) -> None:
    """Raises `ModelError` unless `folder` is an existing folder."""
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # the name is too long, or has parts that may not be read
        raise ModelError(f"{str(folder)[:100]}: no model folder ({error.strerror})") from None
    if not is_folder:
        raise ModelError(f"{folder}: no such model folder")


FINGERPRINT_LEN = 12


def adapted_fingerprint(base: str, digest: str) -> str:
    """Returns the fingerprint of a model with an adapter. base: that of the model; digest: the adapter's."""
    return f"fp_{hashlib.sha256(f'{base} {digest}'.encode()).hexdigest()[:FINGERPRINT_LEN]}"


def weights_fingerprint(model: Decoder) -> str:
    """Returns a hash over names, dtypes, shapes and values of a model's tensors: "fp_" and 12 hex digits."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):  # quantized modules have other entries
            continue
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
        hashed.update(plain.view(-1).view(torch.uint8).numpy().data)  # as bytes, because NumPy has no BF16
    return f"fp_{hashed.hexdigest()[:FINGERPRINT_LEN]}"


SMALLEST_CHAT_MODEL = 135_000_000
"""Parameters of SmolLM2-135M-Instruct, among the smallest published models that answer questions."""


def expectation(num_parameters: int) -> str:
    """Returns a sentence for a model that is too small to answer questions, or "" for a larger one."""
    if num_parameters >= SMALLEST_CHAT_MODEL:
        return ""
    millions = num_parameters / 1e6
    amount = f"{millions:.0f}" if millions >= 10 else f"{millions:.1f}".removesuffix(".0")
    return (
        f"This model has {amount} million parameters: it has learned what answers look like, not facts, "
        "and most of what it says is wrong."
    )
