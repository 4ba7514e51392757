"""What is shown are the tokens and masks that packing gives to training, and data cannot steer terminal or page."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import modelwright
from chat_templates import TOOL_CHAT, WEATHER
from finetune_files import write_examples, write_model
from modelwright.cli.main import main
from modelwright.core.config import ConfigError, DataError
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.recipes.load import finetune_request
from modelwright.recipes.show import Shown, ShownText, show, visible
from refusals import config_error

CHAT = [{"role": "user", "content": "Which  color?"}, {"role": "assistant", "content": "Blue, naïve 猫."}]


def lines_of(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def learned(shown: ShownText) -> str:
    return "".join(span.text for span in shown.spans if span.is_learned)


def whole(shown: ShownText) -> str:
    return "".join(span.text for span in shown.spans)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("show") / "model")


def test_spans_are_the_rendering_of_transformers(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    data = lines_of(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": TOOL_CHAT, "tools": [WEATHER]})
    shown = show(model, data)
    reference = transformers.AutoTokenizer.from_pretrained(model)
    for one, (chat, tools) in zip(shown.texts, ((CHAT, None), (TOOL_CHAT, [WEATHER])), strict=True):
        rendered = reference.apply_chat_template(chat, tools=tools, tokenize=False)
        assert rendered.startswith(whole(one))
        assert rendered.removeprefix(whole(one)).strip() == ""
        assert one.num_tokens == sum(len(ids) for ids in [Tokenizer.load(model).chat.encode_rendered(whole(one))])
    assert learned(shown.texts[0]) == "Blue, naïve 猫.<|im_end|>"
    ends = [span for span in shown.texts[0].spans if span.is_special]
    assert {span.text for span in ends} == {"<|im_start|>", "<|im_end|>"}
    assert "form: messages (2)" in shown.lines


def test_special_tokens_in_a_message_are_plain(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a <|im_end|> b"}, CHAT[1]]
    (one,) = show(model, lines_of(tmp_path / "a.jsonl", {"messages": turns})).texts
    assert "a <|im_end|> b" in next(span.text for span in one.spans if "a <" in span.text and not span.is_special)


def test_preference_has_both_sides(model: Path, tmp_path: Path) -> None:
    record = {"prompt": "Which color?", "chosen": "Blue.", "rejected": "Fish."}
    shown = show(model, lines_of(tmp_path / "a.jsonl", record))
    chosen, rejected = shown.texts
    assert learned(chosen) == "Blue.<|im_end|>"
    assert learned(rejected) == "Fish.<|im_end|>"
    assert chosen.title.endswith("(chosen)")
    assert rejected.title.endswith("(rejected)")
    plain, page = str(shown), shown.html()
    assert ">>Blue." in plain
    assert "~~Fish." in plain
    assert "(to avoid)" in rejected.figures()[0]
    assert '<span class="learned">Blue.' in page
    assert '<span class="avoided">Fish.' in page


def test_unpaired_answer_to_avoid_is_named(model: Path, tmp_path: Path) -> None:
    records = [{"prompt": "Which color?", "completion": word, "label": word == "Blue."} for word in ("Blue.", "Fish.")]
    texts = show(model, lines_of(tmp_path / "a.jsonl", *records)).texts
    assert [re.findall(r"\((.*)\)", one.title) for one in texts] == [["desired"], ["to avoid"]]
    assert [one.is_avoided for one in texts] == [False, True]


def test_truncation_and_cleaning_are_told(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Write to ann@example.org"}, {"role": "assistant", "content": "word " * 900}]
    (one,) = show(model, lines_of(tmp_path / "a.jsonl", {"messages": turns})).texts
    assert one.num_tokens == 512
    assert one.num_cut > 100
    assert "ann@example.org" in whole(one), "as fine-tuning reads it, which replaces no personal data"
    assert f"{one.num_cut:,} tokens" in str(Shown([one]))
    (tmp_path / "b.txt").write_text("The ti\u00adde comes in twice a day.\n", encoding="utf-8")
    (one,) = show(model, tmp_path / "b.txt").texts
    assert "format" in " ".join(one.notes)
    assert "The tide" in learned(one)


def test_figures_are_those_of_the_whole_file(model: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "a.jsonl")
    with open(data, "a", encoding="utf-8") as file:
        file.write("{broken\n")
    shown = show(model, data, rows=1)
    assert len(shown.texts) == 1
    assert "form: messages (62)" in shown.lines
    assert any("1 record could not be read" in line for line in shown.lines)


def test_text_without_turns_is_learned_whole(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The tide comes in twice a day.\n")
    (one,) = show(model, tmp_path / "a.txt").texts
    assert one.num_learned == one.num_tokens
    assert "The tide" in learned(one)


def test_data_steers_neither_terminal_nor_page(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<script>alert(1)</script> \u202e"}, CHAT[1]]
    shown = show(model, lines_of(tmp_path / "\x1b[2J.jsonl", {"messages": turns}), html=tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page
    assert "\x1b" not in str(shown)
    assert "\x1b" not in page
    assert visible("a\x1b[31m\r\n\t猫") == "a\\x1b[31m\\r\n\t猫"


def test_command_and_python_are_the_same(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = lines_of(tmp_path / "a.jsonl", {"messages": CHAT})
    assert main(["show", str(model), str(data), "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert out == str(modelwright.show(model, data, rows=1))
    assert ">>Blue, naïve 猫.\u27e6<|im_end|>\u27e7<<" in out


def test_mistakes(model: Path, tmp_path: Path) -> None:
    with config_error("rows", match="--rows"):
        show(model, "a.jsonl", rows=0)
    with config_error("show"):
        show(model)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        show(model, tmp_path / "empty.jsonl")


def test_dry_run_ends_with_an_example_and_a_run_shows_its_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_examples(tmp_path / "a.jsonl"), tmp_path / "run"
    words = ["finetune", str(model), str(data), "--run-dir", str(run)]
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r">>The color is \w+\.\u27e6<\|im_end\|>\u27e7<<", out)) == 1
    assert "form: messages (62)" in out
    with pytest.raises(ConfigError):
        show(run)
    assert main([*words, "--stages", "clean,pack"]) == 0
    shown = show(run, rows=1)
    # Every piece of a row is an example with its answer, and no token is shown that is not in the row
    assert all(re.fullmatch(r"(?s).*<\|im_end\|>", learned(one)) for one in shown.texts)
    assert sum(one.num_tokens for one in shown.texts) <= 512
    text = "\n".join(shown.lines)
    assert "form: messages (62)" in text
    assert "conversations" in text
    assert "cleaning:" in text


def test_weights_of_files_and_prompts_without_an_answer(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("twice", "half", "once"):
        lines_of(folder / f"{name}.jsonl", *({"ask": f"{name} {n}?", "say": f"It is {n}."} for n in range(40)))
    entry = {"columns": {"prompt": "ask", "response": "say"}}
    weights = {"twice": {"weight": 2}, "half": {"weight": 0.5}, "once": {}}
    registry = {name: {"file_name": f"{name}.jsonl", **entry, **one} for name, one in weights.items()}
    (folder / "datasets.yaml").write_text(json.dumps(registry))
    run, words = tmp_path / "run", ["--data.validation_fraction", "0", "--stages", "clean,pack"]
    assert main(["finetune", str(model), str(folder), "--run-dir", str(run), *words]) == 0
    asked = [re.search(r"(twice|half|once) \d+", whole(one)) for one in show(run, rows=1000).texts]
    times = Counter(match[0] for match in asked if match)
    assert {times[f"twice {n}"] for n in range(40)} == {2}
    assert {times[f"once {n}"] for n in range(40)} == {1}
    assert 8 <= sum(times[f"half {n}"] for n in range(40)) <= 32
    shown = show(model, folder / "twice.jsonl", rows=1)
    assert any("weight 2" in note for note in shown.texts[0].notes)
    prompts = lines_of(tmp_path / "p.jsonl", {"prompt": "Which color?"})
    assert "nothing of it is learned" in str(show(model, prompts))
    with pytest.raises(DataError, match=r"p\.jsonl:1: is a prompt without an answer"):
        finetune_request(str(model), [str(prompts)], {}, str(tmp_path / "other"))


def test_variables_of_the_template_are_those_of_training(model: Path, tmp_path: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    settings["chat_template"] = "{{ 'No thoughts. ' if enable_thinking is false }}" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    record = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    pair = {"prompt": "Which?", "chosen": "Blue.", "rejected": "Red.", **record}
    pair.pop("messages")
    for shown in show(folder, lines_of(tmp_path / "a.jsonl", record, pair)).texts:
        assert whole(shown).startswith("No thoughts. ")


def test_settings_of_reading_are_those_of_the_command_that_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines_of(tmp_path / "a.jsonl", {"q": "Which color?", "a": "Blue.", "context": "The sky."})
    words = ["show", str(model), str(data), "--data.fields", '{"question": "q", "answer": "a"}']
    assert main([*words, "--data.ignore", "context"]) == 0
    printed = capsys.readouterr().out
    assert ">>Blue." in printed
    fields = {"question": "q", "answer": "a"}
    assert str(show(model, data, **{"data.fields": fields, "data.ignore": ["context"]})) == printed
    with config_error("data.ignore", match="no data"):
        show(tmp_path, **{"data.ignore": ["context"]})  # pyright: ignore[reportArgumentType]
