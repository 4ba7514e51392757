"""Shows what a model learns from an example: the rendered tokens, which of them are learned, and what was left out.

`show` takes examples that have not been read yet (with a model, whose tokenizer and chat template render them), or the
packed rows of a run, which are the tokens that its training reads. `modelwright show` and `mw.show` are the same.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from modelwright.core.artifacts import RunDir, is_finished, read_manifest, write_atomic, writing
from modelwright.core.config import ConfigError, DataError, merge, nested_settings, parse
from modelwright.core.texts import redact_text
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import REPORT
from modelwright.data.clean.report import CleanReport, describe_drops
from modelwright.data.clean.steps.privacy import PRIVACY
from modelwright.data.clean.steps.step import CorpusStep, Drop
from modelwright.data.document import WEIGHT, Document
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.examples import ConversationFit, template_variables
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import INDEX
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.chat import ChatLoss
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.hf import load_config
from modelwright.pipeline.cleaning import SOURCES
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.pack import PACK, tokenizer_stage
from modelwright.recipes.cleaning import CleanCommandConfig
from modelwright.recipes.load import MOST_MEASURED, RECIPE, find_run, find_target, settings_of_target

SEQUENCE_OF_PAIR = ("chosen", "rejected")
AVOIDED = (SEQUENCE_OF_PAIR[1], "to avoid")
"""Roles of answers that training makes less likely."""
_CSS = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f4;padding:1em;border-radius:6px}
.learned{background:#cdeccd;color:#0b4d0b}.special{border:1px solid #888;border-radius:3px;padding:0 2px;color:#555}
.avoided{background:#f6d5d5;color:#7a1010}.cut{color:#a33}ul{padding-left:1.2em}"""


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens as text, all learned (weight 1) or none, and all special or none."""

    text: str
    is_learned: bool
    is_special: bool


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """One sequence of tokens as training reads it. title: where it is from and its role; num_cut: tokens at its end
    that do not fit into a row; notes: what cleaning changed, and what else decides how it is learned; is_avoided:
    training makes the tokens with weight 1 less likely.
    """

    title: str
    spans: Sequence[TokenSpan]
    num_tokens: int
    num_learned: int
    num_cut: int = 0
    notes: Sequence[str] = ()
    is_avoided: bool = False

    def figures(self) -> list[str]:
        """Returns lines about tokens, weights and truncation, then the notes."""
        aim = "to avoid" if self.is_avoided else "learned"
        weights = f"weight 1 for {self.num_learned:,} ({aim}), 0 for {self.num_tokens - self.num_learned:,}"
        cut = f"truncated: {self.num_cut:,} tokens at the end are cut" if self.num_cut else "not truncated"
        return [f"tokens: {self.num_tokens:,}; {weights}", cut, *self.notes]


@dataclass(frozen=True)
class Shown:
    """Examples with lines about the sources. `str` marks without color; `rich` gives color; `html` is a whole page."""

    texts: Sequence[ShownText]
    lines: Sequence[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        return self.rich(color=False).plain

    def rich(self, *, color: bool = True) -> Text:
        """Returns the examples for a terminal. Special tokens are framed and in reverse, learned tokens are green,
        those to avoid are red; without color, `>>` and `<<`, or `~~` and `~~`, enclose them.
        """
        result = Text()
        legend = "learned tokens are green" if color else "learned tokens are between >> and <<"
        if any(shown.is_avoided for shown in self.texts):
            legend += ", those to avoid are red" if color else ", those to avoid between ~~ and ~~"
        result.append(f"{legend}, special tokens in \u27e6 \u27e7\n", "dim")
        for shown in self.texts:
            result.append(f"\n--- {visible(shown.title)}\n", "bold")
            marks, learned_style = (("~~", "~~"), "red") if shown.is_avoided else ((">>", "<<"), "green")
            for is_learned, spans in groupby(shown.spans, lambda span: span.is_learned):
                result.append(marks[0] if is_learned and not color else "")
                for span in spans:
                    text = f"\u27e6{visible(span.text)}\u27e7" if span.is_special else visible(span.text)
                    style = learned_style if is_learned else ""
                    result.append(text, f"{style} reverse".strip() if span.is_special else style)
                result.append(marks[1] if is_learned and not color else "")
            result.append("\n")
            for line in shown.figures():
                result.append(f"  {visible(line)}\n")
        result.append("\n" if self.lines else "")
        for line in self.lines:
            result.append(f"{visible(line)}\n")
        return result

    def html(self) -> str:
        """Returns a page without scripts, in which all text of the data is escaped."""
        parts = list[str]()
        for shown in self.texts:
            parts.append(f"<h2>{escape(visible(shown.title))}</h2><pre>")
            learned = "avoided" if shown.is_avoided else "learned"
            for span in shown.spans:
                classes = " ".join(n for n, on in ((learned, span.is_learned), ("special", span.is_special)) if on)
                parts.append(f'<span class="{classes}">{escape(visible(span.text))}</span>')
            parts.append(f'<span class="cut"> [{shown.num_cut:,} tokens cut]</span>' if shown.num_cut else "")
            parts.append(f"</pre><ul>{''.join(f'<li>{escape(visible(line))}' for line in shown.figures())}</ul>")
        rest = "".join(f"<li>{escape(visible(line))}" for line in self.lines)
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
            f"content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>Examples</title><style>{_CSS}</style>"
            '<p><span class="learned">Learned tokens</span>, <span class="avoided">tokens to avoid</span>, '
            '<span class="special">special tokens</span></p>'
            f"{''.join(parts)}<h2>Sources</h2><ul>{rest}</ul></html>\n"
        )

    _repr_html_ = html


def visible(text: str) -> str:
    """Returns a text whose control characters, except line feeds and tabs, are escapes: data must not steer a terminal.
    Characters that change the direction of text or have no width are escapes, too.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def show(
    target: str | Path,
    data: str | Path | Sequence[str] = (),
    *,
    rows: int = 3,
    html: str | Path = "",
    **settings: Any,
) -> Shown:  # fmt: skip
    """Show the first examples of `data` as a model would learn them, or, without data, the first rows of a run.

    target: a run, its name, or a model folder. html: a file to write, too. settings: those of the sections `data` and
    `clean` (`**{"data.ignore": "context"}`). Raises `ConfigError` for a model folder without data, for settings without
    data and for fewer than one row, and `DataError` for data without examples.
    """
    if rows < 1:
        raise ConfigError(f"--rows: must be at least 1, got {rows}")
    sources = (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))
    overrides = nested_settings(CleanCommandConfig, settings)
    if overrides and not sources:
        raise ConfigError(f"{next(iter(settings))}: is a setting of how data is read, and no data is named; name it")
    if sources:
        folder = find_model(find_target(str(target))).source.folder
        # As `modelwright finetune` would read them.
        base = {
            "data": {"sources": list(sources), "validation_fraction": 0.0, "on_bad_record": "skip"},
            CLEAN.name: settings_of_target(RECIPE)[CLEAN.name],
        }
        config = parse(CleanCommandConfig, merge(base, overrides))
        result = show_examples(folder, config.data, config.clean, rows=rows, seq_len=load_config(folder).max_seq_len)
    elif (Path(target) / "config.json").is_file():
        raise ConfigError(f"show: {target} is a model folder; name data after it: modelwright show {target} DATA")
    else:
        result = show_run(find_run(str(target)), rows=rows)
    if html:
        with writing(Path(html)):
            write_atomic(Path(html), result.html())
    return result


def show_examples(
    folder: Path, data: SourceConfig, clean: CleanConfig, *, rows: int, seq_len: int, loss: ChatLoss = "assistant"
) -> Shown:
    """Show the first examples of the sources for the tokenizer in a folder, after the steps of cleaning that look at
    one document at a time. seq_len: tokens of a row. Raises `DataError` if the sources hold no text.
    """
    tokenizer, report = Tokenizer.load(folder), SourceReport()
    steps = build_steps(clean)
    texts, num_shown, num_images = list[ShownText](), 0, 0
    # All records are read, so that the figures of the sources are those of the whole files.
    for document in read_documents(data, report=report, sample=MOST_MEASURED):
        num_images += document.kind == "image"
        if num_shown == rows or document.kind == "image":
            continue
        num_shown += 1
        kept, notes = document, ["held out: not learned"] if document.split == "heldout" else list[str]()
        for step in (one for one in steps if not isinstance(one, CorpusStep)):
            result = step(kept)
            if isinstance(result, Drop):
                notes.append(f"cleaning drops it: {step.name}: {result.reason} {result.detail}".rstrip())
                break
            # What the step privacy replaces may be a secret, and this output may end in a log.
            if changes := changed(kept, result, hides=step.name == PRIVACY.name):
                notes.append(f"cleaning changes it: {step.name}: {changes}")
            kept = result
        texts += _encoded(
            tokenizer,
            kept,
            seq_len,
            loss,
            notes if any("cleaning" in one for one in notes) else [*notes, "cleaning changes nothing"],
        )
    if not texts:
        raise DataError(f"{', '.join(data.sources)}: does not contain an example or text to show")
    lines = source_lines({**report.facts(), "summary": report.summary()})
    if num_images:
        lines.append(f"not shown: {num_images:,} images with their texts")
    corpus_steps = ", ".join(step.name for step in steps if isinstance(step, CorpusStep))
    lines.append(f"not applied here, because they compare all documents: {corpus_steps} (modelwright clean --dry-run)")
    return Shown(texts, lines)


def changed(before: Document, after: Document, *, hides: bool) -> str:
    """Describes the first difference between two versions of a document; "" if there is none. hides: leave out the
    text before the change.
    """
    old, new = (
        json.dumps([one.text, *one.messages, *one.rejected], ensure_ascii=False) if one.has_turns else one.text
        for one in (before, after)
    )
    if old == new:
        return ""
    at = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    part = slice(max(0, at - 10), at + 20)
    return f"{new[part]!r}" if hides else f"{old[part]!r} became {new[part]!r}"


def _encoded(
    tokenizer: Tokenizer, document: Document, seq_len: int, loss: ChatLoss, notes: Sequence[str]
) -> Iterator[ShownText]:
    encoded: list[tuple[str, np.ndarray, np.ndarray]]
    notes, given = list(notes), {"tools": document.tools, "variables": template_variables(document)}
    if WEIGHT in document.meta:
        notes.append(f"weight {document.meta[WEIGHT]:g}: an epoch has it as many times")
    if document.has_turns and not document.has_answer:
        yield shown_text(
            tokenizer, document.id, (ids := np.asarray(tokenizer.chat.encode_prompt(document.messages, **given))),
            np.zeros(len(ids), np.uint8), notes=["a prompt without an answer: nothing of it is learned", *notes],
        )  # fmt: skip
        return
    try:
        if not document.has_turns:
            ids = np.asarray(tokenizer.encode_document(document.text))
            encoded = [("", ids, np.ones(len(ids), np.uint8))]
        elif document.rejected or "desirable" in document.meta:
            prompt, answer = document.messages[: document.prompt_turns], document.messages[document.prompt_turns :]
            sides = [answer, document.rejected] if document.rejected else [answer]
            names = SEQUENCE_OF_PAIR if document.rejected else ("to avoid" if document.is_undesirable else "desired",)
            if "margin" in document.meta:
                notes.append(f"margin of the preference: {document.meta['margin']:g}")
            encoded = [
                (name, *tokenizer.chat.encode_completion([*prompt, *side], len(prompt), **given))
                for name, side in zip(names, sides, strict=True)
            ]
        else:
            chats = tokenizer.chat.encode_training_chats(document.messages, loss=loss, **given)
            encoded = [(f"part {n}" if len(chats) > 1 else "", *chat) for n, chat in enumerate(chats, start=1)]
    except DataError as error:
        yield ShownText(
            title=f"{document.id} (refused)", spans=[TokenSpan(document.text, False, False)], num_tokens=0,
            num_learned=0, notes=[f"training refuses it: {error}"],
        )  # fmt: skip
        return
    for role, ids, mask in encoded:
        title = f"{document.id} ({role})" if role else document.id
        if document.has_turns:
            fit = ConversationFit(seq_len=sys.maxsize, overlong="split")
            if (fitted := fit.fit(ids, mask, stop_ids=tokenizer.stop_ids)) is None:
                yield shown_text(tokenizer, title, ids, mask, notes=["nothing of it is learned: no answer", *notes])
                continue
            ids, mask = fitted
        more = [] if mask[1:seq_len].any() else [f"dropped: no token of an answer fits into {seq_len:,} tokens"]
        num_cut = max(0, len(ids) - seq_len)
        shown = shown_text(tokenizer, title, ids[:seq_len], mask[:seq_len], num_cut=num_cut, notes=[*more, *notes])
        yield replace(shown, is_avoided=role in AVOIDED)


def shown_text(
    tokenizer: Tokenizer, title: str, ids: np.ndarray, mask: np.ndarray, *, num_cut: int = 0, notes: Sequence[str] = ()
) -> ShownText:
    """Returns tokens [T] with their loss mask [T] in spans. Runs are decoded whole: a character may have several."""
    special = tokenizer.added_ids
    keyed = [(bool(m), int(i) in special, int(i)) for i, m in zip(ids, mask, strict=True)]
    spans = list[TokenSpan]()
    for (is_learned, is_special), run in groupby(keyed, lambda key: key[:2]):
        numbers = [key[2] for key in run]
        for part in [[one] for one in numbers] if is_special else [numbers]:
            spans.append(TokenSpan(tokenizer.decode(part, skip_special=False), is_learned, is_special))
    return ShownText(
        title=title, spans=spans, num_tokens=len(ids), num_learned=int(mask.sum()), num_cut=num_cut, notes=notes
    )


def source_lines(facts: Mapping[str, Any]) -> list[str]:
    """Returns lines about sources from the facts of a `SourceReport`: the forms of the records, the fields, and what
    was not read. The only place that says how fields were used.
    """
    forms = ", ".join(f"{name} ({times:,})" for name, times in facts.get("record_types", {}).items())
    kinds = ", ".join(f"{times:,} {name}" for name, times in facts.get("documents", {}).items())
    lines = [f"read: {kinds or 'nothing'}", f"form: {forms or 'plain text'}"]
    return [redact_text(line) for line in [*lines, *facts.get("summary", ())]]


def show_run(run: RunDir, *, rows: int) -> Shown:
    """Show the first packed rows of the last training of a run that has any: the very tokens that it learns from.
    Raises `ConfigError` if the run has not packed rows yet.
    """
    config = read_run_config(run.config)
    packed = run.stage(PACK.name).artifact
    if not config.has(PACK) or not is_finished(packed):
        raise ConfigError(f"show: {run.path} has no packed rows yet; run its stage {PACK.name}, or name data after it")
    tokenizer = Tokenizer.load(run.stage(tokenizer_stage(config)).artifact)
    facts = read_manifest(packed, kind=PACK.name).facts
    names = [stage.rows.name for stage in reversed(config.trainings) if stage.rows]
    # A run may have been told to stop before its trainings.
    names += [name.removesuffix("/train") for name in facts if name.endswith("/train")]
    folders = [packed / name / "train" for name in names if (packed / name / "train" / INDEX).is_file()]
    if not folders:
        raise ConfigError(f"show: {run.path} has packed no row to learn from; name data after it")
    reader = PackedRows(folders[0])
    batch = reader.gather(np.arange(min(rows, reader.num_groups)))
    texts = list[ShownText]()
    for row in range(batch.num_rows):
        segments = batch.segments_BT[row].numpy()
        for piece in range(int(segments.max()) + 1):
            places = np.flatnonzero(segments == piece)
            ids, labels = batch.input_ids_BT[row, places].numpy(), batch.labels_BT[row, places].numpy()
            # A label is the token after its place, so the mask of a token is at the place before it.
            mask = np.append(False, labels[:-1] != IGNORED).astype(np.uint8)
            role = f", {SEQUENCE_OF_PAIR[row % 2]}" if reader.group_size == 2 else ""
            shown = shown_text(tokenizer, f"row {row}, piece {piece}{role}", ids, mask)
            texts.append(replace(shown, is_avoided=role.removeprefix(", ") in AVOIDED))
    lines = [f"rows: {reader.num_rows:,} of {reader.seq_len:,} tokens in {folders[0].relative_to(run.path)}"]
    fit = facts.get("pairs/train") or {}
    if fit:
        lines.append(
            f"truncated: {fit['num_truncated']:,} of {fit['num_conversations']:,} conversations; "
            f"dropped because no answer fits: {fit['num_dropped']:,}"
        )
    clean = run.stage(CLEAN.name).artifact
    if (clean / SOURCES).is_file():
        lines += source_lines(json.loads((clean / SOURCES).read_text(encoding="utf-8")))
    if (clean / REPORT).is_file():
        report = CleanReport(**json.loads((clean / REPORT).read_text(encoding="utf-8")))
        replaced = ", ".join(f"{times:,} {name}" for name, times in report.replaced.items())
        lines.append(f"cleaning: {describe_drops(report)}; replaced: {replaced or 'nothing'}")
    return Shown(texts, lines)
