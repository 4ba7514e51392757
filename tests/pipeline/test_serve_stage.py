"""The serving stage asks what fits the model's context, says what it left out, and finishes in any case."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cleaned import keep_all
from modelwright.core.artifacts import RunDir, read_manifest
from modelwright.data.document import Document
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import single
from modelwright.pipeline.report.results import serving_section
from modelwright.pipeline.report.run_data import read_run
from modelwright.pipeline.runner import run_stages
from modelwright.pipeline.stage import RunConfig, Stage, StageContext
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.pipeline.stages.serve import SERVE_CHECK, ServeCheckConfig
from modelwright.recipes.load import recipe

CONTEXT, MAX_TOKENS = 64, 16
GREETING = "Hello! What can you do?"
SHORT = "What does fox do?"


class Notes:
    """A progress display that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, name: str, total: float, unit: str) -> None: ...

    def advance(self, done: float, **fields: float | str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None: ...


def clean_stage(questions: list[str]) -> Stage:
    def run(context: StageContext) -> None:
        documents = [
            Document(
                id=str(number), text=question, kind="qa", split="heldout", source="own",
                meta={"question": question, "answer": "It runs."},
            )
            for number, question in enumerate(questions)
        ]  # fmt: skip
        keep_all(context.output.path, documents)

    return Stage(name="clean", title="", settings="", parents=(), run=run)


def model_stage() -> Stage:
    def run(context: StageContext) -> None:
        tokenizer = train_tokenizer(["the quick brown fox"] * 3, TokenizerConfig(vocab_size=270))
        model = Decoder(
            ModelConfig(
                vocab_size=270, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
                max_seq_len=CONTEXT,
            )
        )  # fmt: skip
        model.init_weights(1)
        save_model_folder(model, tokenizer, context.output.path)

    return Stage(name="sft", title="", settings="", parents=(), run=run)


def serve(folder: Path, heldout: list[str], **settings) -> tuple[RunConfig, RunDir, list[str]]:
    config = recipe("tiny")
    check = ServeCheckConfig(num_validation_questions=3, max_tokens=MAX_TOKENS)
    config = replace(config, stages=(*config.stages[:-1], SERVE_CHECK))
    config = config.with_sections({SERVE_CHECK.name: replace(check, **settings)})
    run, notes = RunDir(folder / "run").create(), Notes()
    stages = [clean_stage(heldout), model_stage(), SERVE_CHECK.build(config, run, ())]
    run_stages(run, stages, ranks=single(), progress=notes)
    return config, run, notes.notes


def test_held_out_questions_longer_than_the_context_are_left_out(tmp_path: Path) -> None:
    questions = [SHORT if number % 4 == 3 else f"What is {'long ' * 30}{number}?" for number in range(8)]
    config, run, notes = serve(tmp_path, questions)
    result = json.loads((run.stage("serve_check").artifact / "answers.json").read_text())
    assert [answer["question"] for answer in result["answers"]] == [SHORT, SHORT]
    assert result["model"]["digest"] == read_manifest(run.stage("sft").artifact).content_digest
    words = "6 of 8 held-out questions left out: longer than the 48 tokens that serve_check.max_tokens leaves"
    assert any(words in note for note in notes)
    assert words in run.stage("serve_check").log.read_text()
    data = read_run(config, run)
    section = serving_section(data, data.stages[SERVE_CHECK.name])
    assert section is not None
    assert any(words in getattr(block, "text", "") for block in section.blocks)


@pytest.mark.parametrize(("max_tokens", "asked"), [(MAX_TOKENS, [GREETING]), (CONTEXT, [])])
def test_a_stage_without_a_question_that_fits_finishes(tmp_path: Path, max_tokens: int, asked: list[str]) -> None:
    config, run, notes = serve(tmp_path, ["What is " + "long " * 30], max_tokens=max_tokens, questions=("long " * 50,))
    result = json.loads((run.stage("serve_check").artifact / "answers.json").read_text())
    assert [answer["question"] for answer in result["answers"]] == asked
    assert (result["streamed"] is None) == (not asked)
    words = "1 of 1 held-out questions and 1 of serve_check.questions left out"
    assert any(words in note for note in notes)
    data = read_run(config, run)
    section = serving_section(data, data.stages[SERVE_CHECK.name])
    assert section is not None
    assert any(words in getattr(block, "text", "") for block in section.blocks)
