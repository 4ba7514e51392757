"""Text to token ids and back, for one tokenizer in the Hugging Face layout.

What a person writes never becomes a control token: `<|end|>` in a message is encoded as the characters that it
consists of. Only the chat template's own text is read with control tokens.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from modelwright.core.errors import ModelError
from modelwright.serve.errors import ApiError


class Codec:
    """A tokenizer, its control tokens and its chat template ("" when it has none).

    `control_ids`: tokens that end an answer and are never shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat_template: str, names: Mapping[str, str], stop_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._names = dict(names)
        special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.control_ids = tuple(sorted({*special, *stop_ids}))
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(special.values(), key=len, reverse=True))
        )
        self._has_control = bool(special)
        self._template = _compile(chat_template) if chat_template else None
        self._byte_of = _byte_of_character()

    @classmethod
    def load(cls, folder: Path) -> "Codec":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json (all but the
        first may be missing). Raises `ModelError` when they cannot be read."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{folder}: has no readable tokenizer.json ({error})") from None
        settings = _read_json(folder / "tokenizer_config.json")
        separate = folder / "chat_template.jinja"
        template = separate.read_text(encoding="utf-8") if separate.is_file() else settings.get("chat_template") or ""
        names = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        stops = _read_json(folder / "generation_config.json").get("eos_token_id") or []
        stop_ids = [stops] if isinstance(stops, int) else stops
        return cls(tokenizer, chat_template=template, names=names, stop_ids=stop_ids)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """A prompt for plain completion; with the leading token that the tokenizer's post-processor adds, if any."""
        return self._encode_plain(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation up to the place where the assistant's answer begins. Raises `ApiError` 400 when the template
        refuses it or the tokenizer has none."""
        if self._template is None:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
        mark = f"\ue000{secrets.token_hex(8)}:"
        taken: list[str] = []

        def guard(match: re.Match[str]) -> str:
            taken.append(match.group())
            return f"{mark}{len(taken) - 1}\ue001"

        guarded = [{key: self._guarded(key, value, guard) for key, value in m.items()} for m in messages]
        try:
            text = self._template.render(messages=guarded, add_generation_prompt=True, tools=None, **self._names)
        except jinja2.TemplateError as error:
            text = f"The model's chat template refuses these messages: {error}."
            raise ApiError(400, text, param="messages", code="invalid_value") from None
        ids: list[int] = []
        for number, part in enumerate(re.split(re.escape(mark) + "(\\d+)\ue001", text)):
            ids += self._encode_plain(taken[int(part)]) if number % 2 else self._encode_template(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text, control tokens by name."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token as bytes: exact for byte-level vocabularies, else its text in UTF-8."""
        characters = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self.control_ids and all(character in self._byte_of for character in characters):
            return bytes(self._byte_of[character] for character in characters)
        return self.token_text(token_id).encode("utf-8")

    def _guarded(self, key: str, value: str, guard: Any) -> str:
        return self._control.sub(guard, value) if key == "content" and self._has_control else value

    def _encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _encode_template(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _compile(source: str) -> jinja2.Template:
    def refuse(reason: str) -> NoReturn:
        raise jinja2.TemplateError(reason)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"chat template: is not valid Jinja ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path}: is damaged ({error})") from None
    return data if isinstance(data, dict) else {}


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's printable stand-ins for bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
