"""Chat templates in the style of published models: tools, calls and results; marks of what the assistant generates."""

import json
from pathlib import Path
from typing import Any

from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

_TOOLS = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_ANSWER = (
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>"
)
_TURNS = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|im_start|>user\n{{ message.content }}<|im_end|>\n"
    "{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\nANSWER\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (_TOOLS + _TURNS).replace("ANSWER", _ANSWER)
"""ChatML with the notation of Hermes 2 Pro and Qwen2.5 for tools."""
MARKED = (_TOOLS + _TURNS).replace("ANSWER", "{% generation %}" + _ANSWER + "{% endgeneration %}")
"""The same with `{% generation %}` around what the assistant says."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in Bern?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"degrees": 24}'},
    {"role": "assistant", "content": "Yes, 24 degrees."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]


def chatml_tokenizer(folder: Path, template: str, *, vocab_size: int = 420) -> Tokenizer:
    """A byte-level BPE with the special tokens of ChatML, as a folder of Hugging Face."""
    texts = [json.dumps(WEATHER), *(turn["content"] for turn in TOOL_CHAT), "one plus two is three."] * 3
    train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size)).save(folder)
    path = folder / "tokenizer.json"
    definition = path.read_text(encoding="utf-8")
    for old, new in (("<|user|>", "<|im_start|>"), ("<|end|>", "<|im_end|>"), ("<|eos|>", "<|endoftext|>")):
        definition = definition.replace(old, new)
    path.write_text(definition, encoding="utf-8")
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "special_tokens_map.json").unlink()
    return Tokenizer.load(folder)
