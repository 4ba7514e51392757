"""Chat templates written after those of published models, with what is special in each, and kinds of tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    # the system turn has the tools, or the first turn of the user; contents are trimmed; one call in a turn
    "{{- bos_token }}{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge: 2023\n\n' }}"
    "{%- if tools is not none and not tools_in_user_message %}"
    "{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}{%- endif %}{{- system + '<|eot_id|>' }}"
    "{%- if tools_in_user_message and tools is not none %}{%- set first = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{{- '<|start_header_id|>user<|end_header_id|>\n\nCall one of these:\n\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_CHATML_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}{%- endif %}{{- '# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
)
_CALLS = (
    '{%- for call in message.tool_calls %}{{- \'\n<tool_call>\n{"name": "\' + call.function.name }}'
    "{{- '\", \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}"
)
_TOOL_RESULT = (
    # results that follow one another share a turn of the user
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_PLAIN_TURN = "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
QWEN25 = (
    _CHATML_TOOLS
    + "{%- else %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
    + "{%- for message in messages %}{%- if message.role == 'user' or message.role == 'system' and not loop.first or "
    + "message.role == 'assistant' and not message.tool_calls %}"
    + _PLAIN_TURN
    + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    + "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    + _CALLS
    + "{{- '<|im_end|>\n' }}"
    + _TOOL_RESULT
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN3 = (
    # thoughts stay only after the last question; thinking can be switched off
    _CHATML_TOOLS
    + "{%- endif %}{%- set ns = namespace(searching=true, last=messages | length - 1) %}"
    + "{%- for message in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}"
    + "{%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}"
    + "{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    + "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    + "{%- if message.role == 'user' or message.role == 'system' and not loop.first %}"
    + _PLAIN_TURN
    + "{%- elif message.role == 'assistant' %}{%- set thought = '' %}"
    + "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    + "{%- elif '</think>' in content %}"
    + "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    + "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    + "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    + "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    + "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    + "{%- if message.tool_calls %}"
    + _CALLS
    + "{%- endif %}{{- '<|im_end|>\n' }}"
    + _TOOL_RESULT
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    + "{%- endif %}"
)
HERMES = (
    _CHATML_TOOLS
    + "{%- endif %}{%- for message in messages %}"
    + "{%- if message.role == 'user' or message.role == 'system' and not loop.first or "
    + "message.role == 'assistant' and not message.tool_calls %}"
    + _PLAIN_TURN
    + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    + _CALLS
    + "{{- '<|im_end|>\n' }}"
    + _TOOL_RESULT
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL3 = (
    # tools before the last question, the system's text in the last one
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{%- set asked = turns | selectattr('role', 'equalto', 'user') "
    "| list %}{{- bos_token }}{%- for message in turns %}{%- if message.role == 'user' %}"
    "{%- if tools is not none and message == asked[-1] %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}{{- call.function | tojson }}"
    "{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}"
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + message.content | tojson }}"
    "{{- '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
GEMMA3 = (
    # the system's text opens the first question; the assistant is called model
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set opening = messages[0].content + '\n\n' -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set opening = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}"
    "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
    "{{ '<start_of_turn>' + role + '\n' + (opening if loop.first else '') }}{{ message.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
PHI4_MINI = (
    # no line ends; the end of text after the last turn
    "{% for message in messages %}{% if message.role == 'system' and tools %}"
    "{{ '<|system|>' + message.content + '<|tool|>' + tools | tojson + '<|/tool|>' + '<|end|>' }}"
    "{% elif message.tool_calls %}{{ '<|assistant|><|tool_call|>' }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|/tool_call|><|end|>' }}"
    "{% else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
SMOLLM3 = (
    # the marks hold the opening of a turn and the line end after it
    "{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' -%}"
    "{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' + mode + '\n\n' -}}"
    "{%- if messages[0].role == 'system' -%}{{- messages[0].content.replace('/no_think', '').rstrip() + '\n' -}}"
    "{%- endif -%}{%- if xml_tools or tools -%}{{- '### Tools\n<tools>\n' -}}"
    "{%- for tool in (xml_tools or tools) -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '</tools>' -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- for message in messages -%}{%- set content = message.content -%}"
    "{%- if message.role == 'user' -%}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' -}}"
    "{%- elif message.role == 'assistant' -%}{% generation %}"
    "{{- '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') + content.lstrip('\n') -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>\n' -}}{% endgeneration %}"
    "{%- elif message.role == 'tool' -%}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if mode == '/no_think' -%}{{- '<think>\n\n</think>\n' -}}{%- endif -%}{%- endif -%}"
)

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that are not special."""
TEMPLATES: dict[str, tuple[str, list[str], dict[str, str | None]]] = {
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "qwen25": (QWEN25, CHATML, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "qwen3": (QWEN3, CHATML, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "mistral3": (
        MISTRAL3,
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "hermes": (HERMES, CHATML, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "gemma3": (
        GEMMA3, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], {"bos_token": "<bos>", "eos_token": "<eos>"}
    ),
    "phi4-mini": (
        PHI4_MINI,
        ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>",
         "<|tool_call|>", "<|/tool_call|>"],
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "smollm3": (SMOLLM3, CHATML, {"bos_token": None, "eos_token": "<|im_end|>"}),
}  # fmt: skip
"""Template, special tokens, and those that it names, by the model."""

TEXTS = [
    "the cat sat on the mat and said hello to the weather in Bern", "user assistant system model tool result answer",
    "think about one two three numbers { } [ ] : , \" ' name arguments parameters function content",
] * 4  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("byte-bpe", "llama2", "mistral", "gemma", "phi3", "unigram", "wordpiece", "byte-words")
"""Kinds of tokenizer."""


def library(kind: str, special: Sequence[str]) -> tokenizers.Tokenizer:
    """A small vocabulary of a kind, with the special tokens and `WORDS`."""
    if kind in ("byte-bpe", "byte-words"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made.train_from_iterator(
            TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
        made.decoder = decoders.Metaspace()  # type: ignore[assignment]
        # as in T5's vocabulary, special tokens are pieces
        trainer = trainers.UnigramTrainer(
            vocab_size=150 + len(special), special_tokens=["<unk>", *special], unk_token="<unk>", show_progress=False
        )
        made.train_from_iterator(TEXTS, trainer)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=False)  # type: ignore[assignment]
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
        made.decoder = decoders.WordPiece()  # type: ignore[assignment]
        made.train_from_iterator(
            TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
        )
    else:
        learned = tokenizers.Tokenizer(models.BPE())
        learned.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
        learned.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
        model = json.loads(learned.to_str())["model"]
        pieces = ["<unk>", *BYTES, *model["vocab"]]
        vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        made = tokenizers.Tokenizer(
            models.BPE(vocab, [tuple(m) for m in model["merges"]], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        )
        blank = decoders.Replace("▁", " ")
        steps = [blank, decoders.ByteFallback(), decoders.Fuse()]
        if kind == "mistral":
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore
        elif kind == "gemma":
            made.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
        else:
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore
        if kind != "gemma":
            steps.append(decoders.Strip(" ", 1, 0))
        made.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    # Phi-3's tokens take the white space after them
    takes = kind == "phi3"
    made.add_special_tokens([AddedToken(one, normalized=False, rstrip=takes) for one in special])
    made.add_tokens([AddedToken(one, normalized=False, single_word=kind == "wordpiece") for one in WORDS])
    if kind == "byte-words":  # as in GPT-NeoX's vocabulary, runs of blanks are added tokens
        made.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 9)])
        made.add_tokens([AddedToken("<mask>", lstrip=True, special=False), AddedToken("[end]", single_word=True)])
    if kind in ("llama2", "mistral"):
        begin = special[0]
        made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return made


def write_tokenizer(folder: Path, kind: str, name: str, **settings: Any) -> Path:
    """Writes a tokenizer of a kind with the template of a model; returns the folder."""
    template, special, named = TEMPLATES[name]
    folder.mkdir(parents=True, exist_ok=True)
    library(kind, special).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **named, **settings}
    config["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
