"""The template in Go's notation, filled in as Ollama does, gives the text of the model's own chat template."""

import re
from pathlib import Path

import pytest

from chat_templates import HERMES, MARKED, chatml_tokenizer
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.pipeline.exports.gguf import go_template, modelfile

CHATS = [
    [("user", "Hi.")],
    [("system", "Be brief."), ("user", "Hi.")],
    [("user", "Hi."), ("assistant", "Hello."), ("user", "Bye.")],
    [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Bye.")],
]


def filled(template: str, chat: list[tuple[str, str]]) -> str:
    """What Go's text/template makes of the few actions that are used."""
    pattern = (
        r"\{\{ if \.System \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)"
    )
    match = re.fullmatch(pattern, template, flags=re.DOTALL)
    assert match is not None, template
    with_system, without, turn, end = match.groups()
    parts = re.fullmatch(
        r'\{\{ if eq \.Role "user" \}\}(.*)\{\{ else if eq \.Role "assistant" \}\}(.*)\{\{ end \}\}',
        turn,
        flags=re.DOTALL,
    )
    assert parts is not None, turn
    forms = dict(zip(("user", "assistant"), parts.groups(), strict=True))
    system = next((text for role, text in chat if role == "system"), "")
    text = with_system.replace("{{ .System }}", system) if system else without
    turns = [forms[role].replace("{{ .Content }}", said) for role, said in chat if role != "system"]
    return "".join([text, *turns, end])


def own_tokenizer() -> Tokenizer:
    return train_tokenizer(["some words to learn from"], TokenizerConfig(vocab_size=300))


DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}" + HERMES


@pytest.mark.parametrize("template", [HERMES, MARKED, DEFAULT_SYSTEM, ""])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_chats_are_rendered_alike(template: str, adds_bos: bool, tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer(tmp_path, template) if template else own_tokenizer()
    bos = tokenizer.special_tokens.get("bos_token", "") if adds_bos else ""
    derived = go_template(tokenizer, adds_bos=adds_bos)
    for chat in CHATS:
        turns = [{"role": role, "content": text} for role, text in chat]
        expected = tokenizer.chat.render(turns, add_generation_prompt=True)
        assert filled(derived, chat) == expected.removeprefix(bos)


def test_a_template_that_looks_at_other_turns_has_no_such_form(tmp_path: Path) -> None:
    odd = "{% for m in messages %}{{ loop.index }}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = chatml_tokenizer(tmp_path, odd)
    assert go_template(tokenizer, adds_bos=False) == ""
    text = modelfile(tokenizer, "m.gguf", max_seq_len=64, adds_bos=False)
    assert text == 'FROM ./m.gguf\nPARAMETER num_ctx 64\nPARAMETER stop "<|im_end|>"\n'
