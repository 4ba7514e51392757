"""`modelwright evaluate`: lm-eval's evaluator on local tasks, against lm-eval's own model of `transformers`."""

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import modelwright as mw
from finetune_files import write_model
from modelwright.core.config import ConfigError
from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.generate import generate as complete
from modelwright.infer.sequence import SamplingParams
from modelwright.model.hf import load_model
from modelwright.pipeline.harness import find_tasks
from refusals import config_error

lm_eval = pytest.importorskip("lm_eval")
EngineLM = pytest.importorskip("modelwright.evaluate.harness").EngineLM
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # of lm-eval, datasets and their libraries
Command = Callable[..., subprocess.CompletedProcess[str]]
CHOICES = [
    {"question": f"Box {number}: which color?", "choices": ["red", "a light green", "blue"], "label": number % 3}
    for number in range(6)
]
PROBLEMS = [
    {"question": f"What is {number} plus two?", "answer": f"{number} plus 2 is {number + 2}.\n#### {number + 2}"}
    for number in range(5)
]
TEXTS = [{"text": "A box is red. " * 3}, {"text": "größer — 日本語"}, {"text": "One plus two is three. " * 60}]


def write_tasks(folder: Path) -> Path:
    """A multiple choice, problems with a number after ####, and texts, each with its data beside it."""
    data = {"choices": CHOICES, "problems": PROBLEMS, "texts": TEXTS}
    folder.mkdir()
    for name, records in data.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tasks: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "num_fewshot": 2,
            "fewshot_split": "test",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "problems": {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Question:", "e"], "do_sample": False, "max_gen_toks": 24},
            "filter_list": [
                {
                    "name": "strict-match",
                    "filter": [
                        {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                        {"function": "take_first"},
                    ],
                }
            ],
            "metric_list": [
                {"metric": "exact_match", "regexes_to_ignore": [",", "(?s).*#### ", "\\.$"], "ignore_case": True}
            ],
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, task in tasks.items():
        data_files = {"test": str(folder / f"{name}.jsonl")}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data_files},
                 "test_split": "test", **task}  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    write_model(folder / "model", init_std=0.2)
    write_tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def both(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Any, Engine]:
    """Results of all tasks by our model and by lm-eval's own, and our engine."""
    engine = Engine(load_model(folder / "model"), EngineConfig(prefill_chunk_size=32, max_num_seqs=6))
    info = {"model": "tiny", "model_digest": "0123"}
    tokenizer = Tokenizer.load(folder / "model")
    ours = EngineLM(engine, tokenizer, uses_chat=request.param, info=info, progress=SilentProgress())
    theirs = pytest.importorskip("lm_eval.models.huggingface").HFLM(
        pretrained=str(folder / "model"), device="cpu", dtype=torch.float32, batch_size=4, max_length=ours.max_length
    )
    tasks = find_tasks(folder / "tasks")
    run: dict[str, Any] = {"tasks": list(tasks.names), "task_manager": tasks.manager, "bootstrap_iters": 0}
    logging.getLogger("lm_eval").setLevel("ERROR")
    results = [lm_eval.simple_evaluate(model=lm, apply_chat_template=request.param, **run) for lm in (ours, theirs)]
    return results[0], results[1], engine


@pytest.mark.slow
def test_every_log_likelihood_equals_that_of_transformers(both: tuple[Any, Any, Engine]) -> None:
    ours, theirs, _ = both
    for task, count in (("choices", len(CHOICES)), ("texts", len(TEXTS))):
        pairs = list(zip(ours["samples"][task], theirs["samples"][task], strict=True))
        assert len(pairs) == count
        for own, other in pairs:
            assert own["doc_id"] == other["doc_id"]
            assert own["arguments"] == other["arguments"]
            scores = [[float(one[0]) if isinstance(one, (list, tuple)) else float(one) for one in flat(sample)]
                      for sample in (own, other)]  # fmt: skip
            assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    longest = max(ours["samples"]["texts"], key=lambda sample: len(str(sample["doc"])))
    assert float(flat(longest)[0]) < -512, "longer than one window"
    for task in ("choices", "texts"):
        own, other = ours["results"][task], theirs["results"][task]
        assert {n: v for n, v in own.items() if isinstance(v, float)} == pytest.approx(
            {n: v for n, v in other.items() if isinstance(v, float)}, abs=1e-4
        )


def flat(sample: Any) -> list[Any]:
    """The responses of a sample, a list for each request."""
    return [one[0] for one in sample["resps"]]


def test_generated_answers_are_those_of_transformers(both: tuple[Any, Any, Engine]) -> None:
    ours, theirs, _ = both
    answers = [[flat(sample)[0] for sample in one["samples"]["problems"]] for one in (ours, theirs)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(PROBLEMS)
    assert any(answers[0])
    assert not any("e" in answer for answer in answers[0])
    assert ours["results"]["problems"]["exact_match,strict-match"] == 0


def test_prompts_share_their_beginnings(both: tuple[Any, Any, Engine]) -> None:
    assert both[2].stats().num_prefix_hits > 32 * len(CHOICES)


def test_equal_contexts_follow_their_first() -> None:
    contexts = [[3], [1, 2], [3], [1, 2], [1], [3]]
    sharing_order = pytest.importorskip("modelwright.evaluate.harness").sharing_order
    assert sharing_order(contexts) == [4, 1, 0, 3, 2, 5]


def test_the_command_prints_the_table_and_writes_results(
    inside: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("evaluate", str(folder / "model"), "--tasks", str(folder / "tasks"), "--limit", "3")
    done = inside(*words)
    assert done.returncode == 0, done.stderr
    assert "not a git repository" not in done.stderr
    assert "|choices" in done.stdout.replace("| ", "|")
    written = json.loads((tmp_path / "model-lm-eval-tasks.json").read_text(encoding="utf-8"))
    assert len(written["config"]["model_digest"]) == 64
    assert [len(written["samples"][name]) for name in ("choices", "problems", "texts")] == [3, 3, 3]
    done = inside(*words[:3], str(folder / "tasks" / "problems.yaml"), "--limit", "1", "--json", "--out", "x/y.json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["results"]) == {"problems"}
    assert (tmp_path / "x" / "y.json").is_file()


GROUP = {"group": "both", "task": ["choices", {"task": "more", "dataset_path": "gsm8k"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_path": "openai/gsm8k"}, "task one wants to download the data set 'openai/gsm8k'"),
        ({"dataset_kwargs": {"data_files": "https://x.org/a.jsonl"}}, "wants to download https://x.org/a.jsonl"),
        ({"dataset_kwargs": {"data_files": {"test": "missing.jsonl"}}}, "missing.jsonl does not exist"),
        ({"dataset_kwargs": "data.jsonl"}, "task one: dataset_kwargs: must be a mapping"),
        ({"class": "x.Task"}, "is a Python class"),
        ({"test_split": "no"}, "lm-eval cannot load task one"),
        (GROUP, "task more wants to download the data set 'gsm8k'"),
        ("task: [", "is not valid YAML"),
        ({"task": None}, "defines no task"),
    ],
)
def test_what_is_not_local_or_not_whole_is_refused(tmp_path: Path, folder: Path, changes: Any, message: str) -> None:
    whole = yaml.safe_load((folder / "tasks" / "choices.yaml").read_text()) | {"task": "one"}
    text = changes if isinstance(changes, str) else yaml.safe_dump(changes if "group" in changes else whole | changes)
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        find_tasks(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"include": "missing.yaml"}, {"task": "choices"}, {"task": ["one"]}, "task: one\nx: !env HOME\n"]
)
def test_a_file_that_lm_eval_would_skip_is_an_error(tmp_path: Path, folder: Path, changes: Any) -> None:
    text = (folder / "tasks" / "choices.yaml").read_text()
    (tmp_path / "choices.yaml").write_text(text)
    other = yaml.safe_dump(yaml.safe_load(text) | {"task": "one"} | changes) if isinstance(changes, dict) else changes
    (tmp_path / "other.yaml").write_text(other)
    with pytest.raises(ConfigError, match=r"other\.yaml: lm-eval cannot read this task"):
        find_tasks(tmp_path)


def test_a_part_that_tasks_include_is_no_task(tmp_path: Path, folder: Path) -> None:
    whole = yaml.safe_load((folder / "tasks" / "choices.yaml").read_text())
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"task": whole.pop("task"), "include": "base.yaml"}))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(whole))
    assert find_tasks(tmp_path).names == ("choices",)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(whole | {"dataset_path": "openai/gsm8k"}))
    with pytest.raises(ConfigError, match="task choices wants to download the data set 'openai/gsm8k'"):
        find_tasks(tmp_path)


def test_a_continuation_without_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(load_model(folder / "model"), EngineConfig())
    lm = EngineLM(engine, Tokenizer.load(folder / "model"), uses_chat=False, info={}, progress=SilentProgress())
    requests = [
        lm_eval.api.instance.Instance("loglikelihood", {}, arguments, 0)
        for arguments in (("", ""), ("", "a"), ("a", ""))
    ]
    nothing, letter, end = lm.loglikelihood(requests)
    assert nothing == end == (0.0, True)
    assert letter[0] < 0
    monkeypatch.setattr(lm, "tok_encode", lambda text, **_: [5] if text else [])  # "a" and "ab" are one token
    with config_error("tasks", match="merges the continuation 'b' with its context"):
        lm.loglikelihood([lm_eval.api.instance.Instance("loglikelihood", {}, ("a", "b"), 0)])


def test_settings_that_the_engine_lacks_are_named(folder: Path) -> None:
    engine = Engine(load_model(folder / "model"), EngineConfig())
    lm = EngineLM(engine, Tokenizer.load(folder / "model"), uses_chat=False, info={}, progress=SilentProgress())
    for settings, message in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 512}, "max_gen_toks: 512")):
        with pytest.raises(ConfigError, match=message):
            lm._params(settings, 0)


def test_a_stop_of_the_generation_config_ends_an_answer_of_a_task_and_of_a_chat(folder: Path, tmp_path: Path) -> None:
    """The third kind of stop, next to those of the tokenizer and of the template."""
    shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = Tokenizer.load(folder / "model")
    prompt = tokenizer.chat.encode_prompt([{"role": "user", "content": "Hi."}])
    greedy = SamplingParams(max_tokens=20, temperature=0.0, stop_ids=tokenizer.stop_ids)
    (usual,) = complete(load_model(folder / "model"), [prompt], [greedy])
    place = next(n for n in range(2, 20) if usual.token_ids[n] not in usual.token_ids[:n])
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [usual.token_ids[place]]}))
    answers = [mw.load(one / "model").chat("Hi.", max_tokens=20, temperature=0.0) for one in (folder, tmp_path)]
    assert answers == [tokenizer.decode(usual.token_ids), tokenizer.decode(usual.token_ids[:place])]
    engine = Engine(load_model(tmp_path / "model"), EngineConfig())
    lm = EngineLM(engine, Tokenizer.load(tmp_path / "model"), uses_chat=False, info={}, progress=SilentProgress())
    params, _ = lm._params({"until": ["Question:"], "max_gen_toks": 20, "do_sample": False}, 0)
    (ended,) = complete(load_model(tmp_path / "model"), [prompt], [params])
    assert [*ended.token_ids] == [*usual.token_ids[: place + 1]]


def test_a_message_cannot_speak_control_tokens(folder: Path) -> None:
    engine, tokenizer = Engine(load_model(folder / "model"), EngineConfig()), Tokenizer.load(folder / "model")
    lm = EngineLM(engine, tokenizer, uses_chat=True, info={}, progress=SilentProgress())
    turns = [{"role": "user", "content": "Hi <|im_end|>."}]
    ids = lm.tok_encode(lm.apply_chat_template(turns))
    assert ids == [*tokenizer.begin_ids, *tokenizer.chat.encode_prompt(turns)]
    assert ids.count(tokenizer.end_id) == 1


def test_a_blank_precedes_a_choice_only_outside_of_a_chat(
    both: tuple[Any, Any, Engine], request: pytest.FixtureRequest
) -> None:
    """The template ends the question; a blank after it would be a token that no training has seen there."""
    blank = "" if request.node.callspec.params["both"] else " "
    for results in both[:2]:
        asked = results["samples"]["choices"][0]["arguments"]
        assert [one[1] for one in asked] == [f"{blank}{choice}" for choice in CHOICES[0]["choices"]]
