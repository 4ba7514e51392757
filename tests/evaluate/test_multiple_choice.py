import json

import numpy as np
import pytest

from modelwright.core.errors import ConfigError
from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.evaluate import multiple_choice
from modelwright.evaluate.config import EvaluateConfig, MultipleChoiceConfig
from modelwright.evaluate.multiple_choice import answer_questions, summarize_answers
from modelwright.evaluate.questions import build_questions, same_meaning, words_of

WORDS = ["copy", "move", "read", "write", "tree", "list", "file", "node", "edge", "path", "cache", "lock", "queue"]
WORDS += ["stack", "heap", "graph", "table", "index", "key", "row", "door", "wall", "word", "line", "page", "font"]


def make_qa(make_document, count: int, packages: int = 3, modules: int = 4) -> list:
    rng = np.random.default_rng(0)
    documents = []
    for i in range(count):
        module = f"pack{i % packages}.mod{i // packages % modules}"
        answer = " ".join(rng.choice(WORDS, rng.integers(6, 14))) + "."
        meta = {"question": f"What does `{module}.f{i}` do?", "answer": answer, "module": module}
        documents.append(make_document(id=f"q{i:03d}", text=answer, kind="qa", meta=meta))
    return documents


def test_questions_are_deterministic_and_well_formed(make_document) -> None:
    documents = make_qa(make_document, 200)
    module_of = {document.id: document.meta["module"] for document in documents}
    questions = build_questions(documents, MultipleChoiceConfig(num_questions=80))
    assert questions == build_questions(documents[::-1], MultipleChoiceConfig(num_questions=80))
    assert len({question.id for question in questions}) == 80
    for question in questions:
        right = next(d for d in documents if d.id == question.id)
        assert question.candidates[question.answer] == right.meta["answer"]
        assert len(set(question.candidates)) == 4
        if question.tier.startswith("same package"):
            for other in question.distractor_ids:
                assert module_of[other].split(".")[0] == module_of[question.id].split(".")[0]
                assert module_of[other] != module_of[question.id]
        sizes = [len(text) for text in question.candidates]
        assert max(sizes) <= 1.5**2 * min(sizes)
    assert sum(question.tier.startswith("same package") for question in questions) > 60


def test_neither_place_nor_length_tells_the_answer(make_document) -> None:
    questions = build_questions(make_qa(make_document, 800), MultipleChoiceConfig(num_questions=800))
    assert len(questions) > 600
    places = np.bincount([q.answer for q in questions], minlength=4) / len(questions)
    np.testing.assert_allclose(places, 0.25, atol=0.06)
    sizes = np.array([[len(text) for text in q.candidates] for q in questions])
    answers = sizes[np.arange(len(sizes)), [q.answer for q in questions]][:, None]
    for cue in (sizes.max(1, keepdims=True), sizes.min(1, keepdims=True)):
        credit = (answers == cue) / (sizes == cue).sum(1, keepdims=True)
        assert abs(credit.mean() - 0.25) < 0.05


def test_no_distractor_says_what_the_answer_says(make_document) -> None:
    def document(i: int, answer: str, name: str):
        meta = {"question": f"What does `pack.m{i}.{name}` do?", "answer": answer, "module": f"pack.m{i}"}
        return make_document(id=str(i), text=answer, kind="qa", meta=meta)

    answers = ["Copy a file tree to a place.", "copy a FILE tree, to a place", "Copy a file tree to a place. Fast."]
    documents = [document(i, answer, f"f{i}") for i, answer in enumerate(answers)]
    assert build_questions(documents * 2, MultipleChoiceConfig()) == []
    others = ["Sort rows by their key now.", "Lock the queue until freed.", "Draw all edges of graphs on it."]
    documents += [document(i + 10, answer, f"g{i}") for i, answer in enumerate(others)]
    for question in build_questions(documents, MultipleChoiceConfig()):
        assert sum(text in answers for text in question.candidates) <= 1
    aliases = [document(i, text, "same_name") for i, text in enumerate([*others, answers[0]])]
    assert build_questions(aliases, MultipleChoiceConfig()) == []


def test_same_meaning() -> None:
    assert words_of("copy_tree(CopyTree2)") == ("copy", "tree", "copy", "tree2")
    assert same_meaning(("a", "b"), ("a", "b", "c", "d", "e"))
    assert not same_meaning(("a", "b"), ("c", "b", "a", "d", "e"))


@pytest.mark.parametrize("score", ["byte", "token", "pmi"])
def test_a_model_that_knows_the_answers_is_right(monkeypatch, model, tokenizer, make_document, score: str) -> None:
    """An oracle in the model's place: likes what answers the question in the prompt, and plain texts a little."""
    documents = make_qa(make_document, 60)
    truth = {d.meta["question"]: d.meta["answer"] for d in documents}

    def oracle(model, sequences, **settings):
        nats = []
        for scored in sequences:
            prompt = bytes(i for i in scored.ids[: scored.first] if i < 256).decode()
            answer = bytes(scored.ids[scored.first :]).decode()
            nats.append(len(answer) * (1.0 if truth.get(prompt) == answer else 2.0))
        return np.array(nats)

    monkeypatch.setattr(multiple_choice, "sequence_nats", oracle)
    config = EvaluateConfig(multiple_choice=MultipleChoiceConfig(num_questions=30, score=score))
    questions = build_questions(documents, config.multiple_choice)
    records = answer_questions(model, tokenizer, questions, config, progress=SilentProgress())
    summary = summarize_answers(records, score=score)
    assert summary["accuracy"] == 1.0
    assert summary["p_value"] == pytest.approx(0.25**30)
    assert ("pmi" in summary["by_score"]) == (score == "pmi")
    assert json.loads(json.dumps(records)) == records


def test_an_untrained_model_is_at_chance_and_scores_are_per_length(model, tokenizer, make_document) -> None:
    config = EvaluateConfig(multiple_choice=MultipleChoiceConfig(num_questions=25))
    questions = build_questions(make_qa(make_document, 60), config.multiple_choice)
    records = answer_questions(model, tokenizer, questions, config, progress=SilentProgress())
    for record in records:
        assert record["bytes"] == [len(text.encode()) for text in record["candidates"]]
        expected = -np.array(record["nats"]) / record["bytes"]
        np.testing.assert_allclose(record["scores"]["byte"], expected)
        assert record["choice"] == int(expected.argmax())
    summary = summarize_answers(records, score="byte")
    assert summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"]
    assert summary["p_value"] > 1e-4
    assert set(summary["cues"]) == {"longest", "shortest", "shared_words"}


def test_no_questions_is_a_result_too() -> None:
    summary = summarize_answers([], score="byte")
    assert summary["questions"] == 0
    assert summary["p_value"] == 1.0


def test_config_errors_say_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match="context_overlap: must be at least 0 and below 1"):
        EvaluateConfig(context_overlap=1.0)
    with pytest.raises(ConfigError, match="min_answer_bytes"):
        MultipleChoiceConfig(min_answer_bytes=500)


def test_candidates_are_scored_in_the_format_of_fine_tuning() -> None:
    """Prompt and answer as they are encoded here are what SFT trains on, up to the token that ends the turn."""
    tokenizer = train_tokenizer(["Copies a tree of files. What does it do?"] * 3, TokenizerConfig(vocab_size=300))
    turns = [{"role": "user", "content": "What does `a.b` do?"}, {"role": "assistant", "content": "Copies a tree."}]
    ids, mask = tokenizer.encode_chat(turns)
    scored = [*tokenizer.encode_prompt(turns[:1]), *tokenizer.encode(turns[1]["content"])]
    assert ids[: len(scored)].tolist() == scored
    assert mask[: len(scored)].sum() == len(tokenizer.encode(turns[1]["content"]))
    assert len(ids) == len(scored) + 1
