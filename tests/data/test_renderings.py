"""Training rows and prompts against `transformers`, id by id, for templates of published models and kinds of tokenizer.

Special tokens that users write are compared, too: in the reference the special tokens have other names, so that such
text is plain there.
"""

import json
import random
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.data.rows.examples import ConversationFit
from modelwright.data.tokenizer.tokenizer import Tokenizer
from published_templates import KINDS, TEMPLATES, WORDS, write_tokenizer

transformers = pytest.importorskip("transformers")

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a <b>city</b> & more: 'é'.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WITHOUT_TOOLS = ("gemma3",)


def renamed(text: str, special: list[str]) -> str:
    """The text with other names for special tokens, also where a template makes them from parts."""
    for token in special:
        if not token.startswith("<|"):
            text = text.replace(token, f"\ue000{token[1:-1]}\ue001")
    return text.replace("<|", "\ue000").replace("|>", "\ue001")


def reference(folder: Path, name: str) -> Any:
    """The tokenizer of `transformers` with renamed special tokens."""
    special, target = TEMPLATES[name][1], folder / "reference"
    target.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        value = json.loads((folder / file).read_text(encoding="utf-8"))
        text = renamed(json.dumps(value, ensure_ascii=False), special)
        (target / file).write_text(text, encoding="utf-8")
    return transformers.PreTrainedTokenizerFast.from_pretrained(target)


def conversation(draw: random.Random, name: str) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Turns, tools and variables: thoughts, calls, empty turns, odd white space, special tokens in turns of users."""
    words = ["hello", "cat", "é", "你好", "😀", "\n", "\n\n", "  ", "\t", " ", "{", '"', "\\", "one two", "<b>", "'"]
    odd = [*words, *TEMPLATES[name][1], *WORDS]

    def text(pieces: list[str]) -> str:
        return "".join(draw.choice(pieces) for _ in range(draw.randint(0, 9)))

    turns: list[dict[str, Any]] = []
    tools = [TOOL] if name not in WITHOUT_TOOLS and draw.random() < 0.4 else []
    if draw.random() < 0.5:
        turns.append({"role": "system", "content": text(odd)})
    for _ in range(draw.randint(1, 4)):
        turns.append({"role": "user", "content": text(odd)})
        if tools and draw.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": text(odd)}}}
            content = "" if draw.random() < 0.7 else text(words)
            turns.append({"role": "assistant", "content": content, "tool_calls": [call]})
            turns.append({"role": "tool", "name": "weather", "content": text(odd)})
        said = text([*words, "<tool_call>"])
        if name == "smollm3":  # its marks count empty turns, too
            said = said.strip() or "yes"
        turn: dict[str, Any] = {"role": "assistant", "content": said}
        if draw.random() < 0.3:
            turn["content"] = f"<think>\n{text(words).strip()}\n</think>\n\n{said}"
        elif name == "qwen3" and draw.random() < 0.3:
            turn["reasoning_content"] = text(words)
        if name != "smollm3" and draw.random() < 0.1:
            turn["train"] = False
        turns.append(turn)
    if name not in ("qwen3", "smollm3") or draw.random() < 0.7:
        return turns, tools, {}
    # Qwen3's prompt without thinking has an empty thought, which no other one may follow
    thinks = any("</think>" in turn["content"] or "reasoning_content" in turn for turn in turns)
    return turns, tools, {"enable_thinking": (name == "qwen3" and thinks) or draw.random() < 0.5}


class Chat:
    """A conversation, and what the template of `transformers` makes of it, which is the same for all tokenizers."""

    def __init__(self, turns: list[dict[str, Any]], tools: list[Any], variables: dict[str, Any]) -> None:
        self.turns, self.tools, self.variables = turns, tools, variables
        self.plain = [{key: value for key, value in turn.items() if key != "train"} for turn in turns]
        self._texts: dict[tuple[int, bool], str] = {}

    def applied(self, theirs: Any, count: int, **kwargs: Any) -> Any:
        return theirs.apply_chat_template(self.plain[:count], tools=self.tools or None, **self.variables, **kwargs)

    def rendered(self, theirs: Any, count: int, *, is_prompt: bool = False) -> str:
        """The first turns as a text, which serves several rows, answers and tokenizers."""
        if (count, is_prompt) not in self._texts:
            text = self.applied(theirs, count, tokenize=False, add_generation_prompt=is_prompt)
            self._texts[count, is_prompt] = text
        return self._texts[count, is_prompt]


@lru_cache(maxsize=1)  # the tests of a template follow one another
def chats(name: str, count: int) -> list[Chat]:
    draw = random.Random(name)
    return [Chat(*conversation(draw, name)) for _ in range(count)]


def check_rows(tokenizer: Tokenizer, theirs: Any, name: str, chat: Chat) -> None:
    turns, plain, tools, variables = chat.turns, chat.plain, chat.tools, chat.variables

    @cache
    def encoded(count: int) -> Any:
        """The first turns as `apply_chat_template` tokenizes its text, with the characters of each token."""
        return theirs(chat.rendered(theirs, count), add_special_tokens=False, return_offsets_mapping=True)

    wanted = [
        number
        for number, turn in enumerate(turns)
        if turn["role"] == "assistant"
        and turn.get("train", True)
        and (turn["content"].strip() or turn.get("tool_calls"))
    ]
    rows = tokenizer.chat.encode_training_chats(turns, tools=tools, variables=variables)
    if name == "smollm3":
        whole = chat.applied(theirs, len(plain), return_dict=True, return_assistant_tokens_mask=True)
        ((ids, mask),) = rows
        assert ids.tolist() == whole["input_ids"]
        assert mask.tolist() == whole["assistant_masks"]
        fitted = ConversationFit(seq_len=10_000, overlong="skip").fit(ids, mask, stop_ids=tokenizer.stop_ids)
        assert fitted is not None
        assert fitted[0].tolist() == whole["input_ids"][: len(fitted[0])], "no second end token"
        return
    if name == "mistral3" and turns[0]["role"] == "system":
        # Mistral's omits the system's text once its question is answered; it is learned after what the server has
        expected_rows = []
        for number in wanted:
            prompt = chat.rendered(theirs, number, is_prompt=True)
            call, said = plain[number].get("tool_calls"), f" {plain[number]['content'].strip()}"
            if call:
                mark = renamed("[TOOL_CALLS]", TEMPLATES[name][1])
                said = f"{mark} [{json.dumps(call[0]['function'], ensure_ascii=False)}]"
            expected_rows.append(theirs(f"{prompt}{said}{theirs.eos_token}", add_special_tokens=False)["input_ids"])
        assert all(ids.tolist() in expected_rows for ids, _ in rows)
        return
    learned: list[int] = []
    for ids, mask in rows:
        # a row is a conversation up to one of its answers, as transformers has it
        last = next(
            number for number in [len(turns) - 1, *reversed(wanted)] if encoded(number + 1)["input_ids"] == ids.tolist()
        )
        text = chat.rendered(theirs, last + 1)
        starts, ends = np.array(encoded(last + 1)["offset_mapping"]).reshape(-1, 2).T
        is_added = np.isin(ids, [*tokenizer._added.values()])
        expected = np.zeros(len(ids), dtype=np.uint8)
        for number in [one for one in wanted if one <= last]:
            prompt = chat.rendered(theirs, number, is_prompt=True)
            answered = chat.rendered(theirs, number + 1)[len(prompt) :]
            stops = [theirs.convert_ids_to_tokens(stop) for stop in tokenizer.stop_ids]
            end = min(place + len(stop) for stop in stops if (place := answered.find(stop)) >= 0)
            if text.startswith(prompt + answered[:end]) and number not in learned:
                learned.append(number)
                # a special token may take the blanks at the beginning of an answer
                inside = (ends > len(prompt)) & (starts < len(prompt) + end)
                expected |= inside & ((starts >= len(prompt)) | ~is_added)
                assert (
                    tokenizer.chat.encode_prompt(turns[:number], tools=tools, variables=variables)
                    == theirs(prompt, add_special_tokens=False)["input_ids"]
                ), "what the server makes of the prompt"
        assert mask.tolist() == expected.tolist()
    assert sorted(learned) == wanted, "each answer once"


def compare(tmp_path: Path, kind: str, name: str, count: int) -> None:
    folder = write_tokenizer(tmp_path / "own", kind, name)
    tokenizer, theirs = Tokenizer.load(folder), reference(folder, name)
    for number, chat in enumerate(chats(name, count)):
        if number < 3:  # what the tokenizers share is what this one renders, too
            text, ids = chat.rendered(theirs, len(chat.turns)), chat.applied(theirs, len(chat.turns))["input_ids"]
            assert chat.applied(theirs, len(chat.turns), tokenize=False) == text
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        check_rows(tokenizer, theirs, name, chat)


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_rows_and_prompts_are_those_of_transformers(tmp_path: Path, number: int) -> None:
    # each template and each kind once
    compare(tmp_path, KINDS[number], [*TEMPLATES][number], 12)
    compare(tmp_path / "b", KINDS[(number + 3) % len(KINDS)], [*TEMPLATES][number], 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_conversations(tmp_path: Path, kind: str, name: str) -> None:
    compare(tmp_path, kind, name, 200)
