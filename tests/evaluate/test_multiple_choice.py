import json
from collections.abc import Sequence

import numpy as np
import pytest

from modelwright.core.progress import SilentProgress
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.evaluate import multiple_choice
from modelwright.evaluate.multiple_choice import (
    Similarity,
    answer_questions,
    build_questions,
    same_meaning,
    summarize_answers,
    words_of,
)
from modelwright.evaluate.scoring import EvaluateConfig, MultipleChoiceConfig
from refusals import config_error

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
    package_of = {document.id: document.meta["module"].split(".")[0] for document in documents}
    questions = build_questions(documents, MultipleChoiceConfig(num_questions=80))
    assert questions == build_questions(documents[::-1], MultipleChoiceConfig(num_questions=80))
    assert len({question.id for question in questions}) == 80
    for question in questions:
        right = next(d for d in documents if d.id == question.id)
        assert question.candidates[question.answer] == right.meta["answer"]
        assert len(set(question.candidates)) == 4
        if question.tier == "same package":
            assert {package_of[other] for other in question.distractor_ids} == {package_of[question.id]}
        sizes = [len(text) for text in question.candidates]
        assert max(sizes) <= 2.0**2 * min(sizes)
    assert sum(question.tier == "same package" for question in questions) > 60


@pytest.mark.slow
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


def test_words_of_the_question_do_not_tell_the_answer(make_document) -> None:
    """Each name is two words of its answer, so that of four answers that are drawn at random nearly always the right
    one shares most words with the question.
    """
    rng = np.random.default_rng(1)
    documents = []
    for i in range(900):
        words = rng.choice(WORDS, 7, replace=False)
        question, answer = f"What does `pack.m{i}.{words[0]}_{words[1]}` do?", " ".join(sorted(words))
        meta = {"question": question, "answer": answer, "module": f"pack.m{i}", "name": f"{words[0]}_{words[1]}"}
        documents.append(make_document(id=f"q{i:03d}", text=answer, kind="qa", meta=meta))
    questions = build_questions(documents, MultipleChoiceConfig(num_questions=200))
    assert len(questions) == 200

    def shared_words(question: str, candidates: Sequence[str], answer: int) -> float:
        shared = [len(set(words_of(question)) & set(words_of(text))) for text in candidates]
        return (shared[answer] == max(shared)) / shared.count(max(shared))

    drawn = []
    for document in documents:
        others = [other.meta["answer"] for other in rng.choice(documents, 3)]
        drawn.append(shared_words(document.meta["question"], [document.meta["answer"], *others], 0))
    chosen = [shared_words(q.question, q.candidates, q.answer) for q in questions]
    assert np.mean(drawn) > 0.8
    assert np.mean(chosen) < 0.45


def test_similarity_is_that_of_its_definition() -> None:
    texts = [("copy", "tree"), ("copies", "a"), ("move", "tree", "tree")]
    question = ("copytree", "tree")

    def features(words: Sequence[str]) -> set[str]:
        return {f"={word}" for word in words} | {word[i : i + 4] for word in words for i in range(len(word) - 3)}

    expected = []
    for text in texts:
        total = 0.0
        for feature in features(text) & features(question):
            weight = 4.0 if feature.startswith("=") else 1.0
            total += weight * np.log(4 / sum(feature in features(other) for other in texts))
        expected.append(total / np.sqrt(len(features(text))))
    np.testing.assert_allclose(Similarity(texts).to(question), expected)
    assert expected[0] > expected[2] > expected[1] == 0


def test_the_lead_is_given_and_not_scored(monkeypatch, model, tokenizer, make_document) -> None:
    documents = make_qa(make_document, 60)
    for document in documents:
        name = document.meta["question"].split("`")[1]
        lead = f"`{name}`:"
        document.meta["title"], document.meta["answer"] = lead, f"{lead} {document.meta['answer']}"
    seen: list[tuple[str, str]] = []

    def record(model, sequences, **settings):
        texts = [bytes(i for i in scored.ids if i < 256) for scored in sequences]
        seen.extend((text[:n].decode(), text[n:].decode()) for text, n in zip(texts, _firsts(sequences), strict=True))
        return np.ones(len(sequences))

    monkeypatch.setattr(multiple_choice, "sequence_nats", record)
    config = EvaluateConfig(multiple_choice=MultipleChoiceConfig(num_questions=2))
    questions = build_questions(documents, config.multiple_choice)
    answer_questions(model, tokenizer, questions, config, progress=SilentProgress())
    asked, neutral = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    expected = [(f"{q.question}{q.lead}", f" {text}") for q in questions for text in q.candidates]
    assert asked == expected
    assert neutral == [("What does it do?`it`:", text) for _, text in expected]
    assert not any("`" in text for q in questions for text in q.candidates)


def _firsts(sequences) -> list[int]:
    """Bytes of each sequence before what is scored; the tokens of the chat format are none."""
    return [sum(i < 256 for i in scored.ids[: scored.first]) for scored in sequences]


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
    assert set(summary["by_score"]) == {"byte", "token", "pmi", "without_question"}
    assert summary["by_score"]["without_question"] < 0.7, "the oracle knows nothing without the question"
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
    assert set(summary["cues"]) == {"longest", "shortest", "shared_words", "shared_parts_of_words"}


def test_no_questions_is_a_result_too() -> None:
    summary = summarize_answers([], score="byte")
    assert summary["questions"] == 0
    assert summary["p_value"] == 1.0


def test_config_errors_say_what_would_be_right() -> None:
    with config_error("context_overlap"):
        EvaluateConfig(context_overlap=1.0)
    with config_error("min_answer_bytes"):
        MultipleChoiceConfig(min_answer_bytes=500)


def test_candidates_are_scored_in_the_format_of_fine_tuning() -> None:
    """Prompt and answer as they are encoded here are what SFT trains on, up to the token that ends the turn."""
    tokenizer = train_tokenizer(["Copies a tree of files. What does it do?"] * 3, TokenizerConfig(vocab_size=300))
    turns = [{"role": "user", "content": "What does `a.b` do?"}, {"role": "assistant", "content": "Copies a tree."}]
    ids, mask = tokenizer.chat.encode_chat(turns)
    scored = [*tokenizer.chat.encode_prompt(turns[:1]), *tokenizer.encode(turns[1]["content"])]
    assert ids[: len(scored)].tolist() == scored
    assert mask[: len(scored)].sum() == len(tokenizer.encode(turns[1]["content"]))
    assert len(ids) == len(scored) + 1


def test_a_title_that_the_answer_does_not_begin_with_is_no_lead(make_document) -> None:
    """A record's own field of that name, kept with data.keep_fields."""
    documents = make_qa(make_document, 60)
    for document in documents:
        document.meta["title"] = "University of Notre Dame"
    questions = build_questions(documents, MultipleChoiceConfig(num_questions=5))
    assert {question.lead for question in questions} == {""}
