"""What a tool would train on after reading a file, and how that compares with what the file says.

Here is also how Modelwright itself reads one; `reader_worker` does it for the other tools.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from modelwright.core.config import ModelwrightError
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.pipeline.run import execute
from modelwright.pipeline.stages.dpo import PAIR_ROWS
from modelwright.pipeline.stages.kto import LABELED_ROWS
from modelwright.pipeline.stages.rows import CHAT_ROWS
from modelwright.recipes.load import finetune_request
from modelwright_claims.memory_probe import probe_model
from modelwright_claims.reader_cases import ROW_LEN, Case

OUTCOMES = ("exact", "refused", "said", "silent")
"""Learned as the file says; an error before training; something else that the log says; something else that it does not
say."""
EXACT, REFUSED, SAID, SILENT = range(len(OUTCOMES))
SAYS = re.compile(
    r"(?i)\b(drop(s|ped|ping)?|skip(s|ped|ping)?|ignor(es?|ed|ing)|truncat(es?|ed|ing)|cut|invalid|abnormal|left out"
    r"|unused|missing|empty|duplicates?|chang(es?|ed)|convert(s|ed)?|exceeds?|longer than|not (used|learned))\b"
)
"""What a line of a log says of a record that is not learned as it stands."""
END, SPECIAL, WORDS = "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>")
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ '' + message.content }}{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as in Qwen2.5, whose `+` refuses a content that is no text, with the marks that TRL needs to learn answers."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a tool would train on, without special tokens. learned: the tokens with a label; context: the others."""

    learned: str
    context: str
    learned_ids: frozenset[int]
    is_rejected: bool
    text: str

    @classmethod
    def of(cls, ids: Sequence[int], labels: Sequence[int], is_rejected: bool, tokenizer: Tokenizer) -> "Example":
        learned = [one for one, label in zip(ids, labels, strict=True) if label >= 0]
        context = [one for one, label in zip(ids, labels, strict=True) if label < 0]
        return cls(
            learned=tokenizer.decode(learned), context=tokenizer.decode(context), learned_ids=frozenset(learned),
            is_rejected=is_rejected, text=tokenizer.decode(ids),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a tool made of a file. examples: ids, labels (negative: not learned) and whether it is a rejected answer."""

    examples: Sequence[tuple[Sequence[int], Sequence[int], bool]] = ()
    error: str = ""
    log: str = ""


@dataclass
class Notes:
    """The progress of a run, of which the notes are kept: they are what a user sees."""

    lines: list[str] = field(default_factory=list[str])

    def begin(self, name: str, total: float, unit: str) -> None: ...

    def advance(self, done: float, **fields: float | str) -> None: ...

    def note(self, text: str) -> None:
        self.lines.append(text)

    def end(self) -> None: ...


def write_model(folder: Path) -> Tokenizer:
    """Write a small model whose tokens are bytes, with the special tokens of ChatML, for all tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    size = library.get_vocab_size(with_added_tokens=True)
    shape = probe_model(model_dim=16, num_layers=1, vocab_size=size, seq_len=ROW_LEN, head_dim=16)
    model = Decoder(shape)
    model.init_weights(0)
    save_model(model, folder, eos_id=library.token_to_id(END))
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": END,
        "pad_token": SPECIAL[0], "model_max_length": ROW_LEN, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Tokenizer.load(folder)


def read_own(case: Case, path: Path, model: Path) -> Reading:
    """Read a file by the stages of `modelwright finetune` up to the packed rows."""
    notes, rows = Notes(), {"sft": CHAT_ROWS, "dpo": PAIR_ROWS, "kto": LABELED_ROWS}[case.stage]
    settings: dict[str, Any] = {
        "data": {"validation_fraction": 0.0, "fields": dict(case.names)},
        "clean": {"num_workers": 1}, "hardware": {"device": "cpu", "num_threads": 1}, "pack": {"seq_len": ROW_LEN},
        "training": {"precision": {"policy": "fp32", "fp32_matmul": "default"}},
    }  # fmt: skip
    made, folder = ("clean", "pack"), str(path.parent / "run")
    try:
        request = finetune_request(str(model), [str(path)], settings, folder, only=(*made, case.stage))
        notes.lines += request.notes
        words = ["finetune", str(model), str(path)]
        execute(request.config, request.run, only=made, origin=request.origin, words=words, progress=notes)
    except ModelwrightError as error:
        return Reading(error=str(error), log="\n".join(notes.lines))
    packed = PackedRows(request.run.stage("pack").artifact / rows.name / "train")
    batch = packed.gather(np.arange(packed.num_groups))
    values = batch.extras.get("values_BT")
    examples = list[tuple[Sequence[int], Sequence[int], bool]]()
    for row, segments in enumerate(batch.segments_BT.numpy()):
        if case.stage == "kto" and row % 2:
            continue  # answers to other prompts, of which no loss is taken
        for segment in range(segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            ids, labels = batch.input_ids_BT[row, at].tolist(), [-1, *batch.labels_BT[row, at[:-1]].tolist()]
            is_bad = case.stage == "dpo" and row % 2 == 1
            if case.stage == "kto" and values is not None:
                is_bad = not values[row, at[0]]
            examples.append((ids, labels, is_bad))
    return Reading(examples=examples, log="\n".join(notes.lines))


def differences(case: Case, examples: Sequence[Example], tokenizer: Tokenizer) -> Iterator[str]:
    """What the examples of a file learn besides or instead of what it says. Case does not matter: true may be True."""
    if not case.records:
        yield "is not refused"
    for record in case.records:
        own = [one for one in examples if record.key in one.text]
        if not own and not record.is_optional:
            yield f"{record.key} is in no example"
            continue
        for is_rejected, expected in ((False, record.learned), (True, record.rejected)):
            rest = "".join(one.learned for one in own if one.is_rejected == is_rejected).casefold()
            for text in map(str.casefold, expected):
                if text not in rest:
                    yield f"does not learn {text!r}"
                rest = rest.replace(text, "", 1)
            if rest.strip() and not record.is_loose:
                yield f"learns {rest.strip()!r}"
        for one in own:
            yield from (f"lacks the context {text!r}" for text in record.context if text not in one.context)
            yield from (f"learns {text!r}" for text in record.never if text in one.learned)
            yield from (
                f"learns {token} as other tokens" for token in record.tokens
                if tokenizer.id_of(token) not in one.learned_ids
            )  # fmt: skip
    if case.records and any(all(record.key not in one.text for record in case.records) for one in examples):
        yield "has an example of no record"


def outcome_of(case: Case, reading: Reading, tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the place of a reading in `OUTCOMES`, and the error, the line of the log or the difference behind it."""
    if reading.error:
        return REFUSED, reading.error
    examples = [Example.of(*one, tokenizer) for one in reading.examples]
    problem = next(differences(case, examples, tokenizer), "")
    if not problem:
        return EXACT, ""
    lines = reading.log.splitlines()
    said = next((line for line in lines if SAYS.search(line) and re.search(case.about, line)), "")
    return (SAID, said) if said else (SILENT, problem)
