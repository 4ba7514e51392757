"""The reward of a reward model as a term of a sum: the score of each conversation, as the model gives it alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tiny_rollouts
from modelwright.model.attention import causal_attend
from modelwright.model.hf import load_sequence_classifier, save_sequence_classifier
from modelwright.objectives.preference import MODEL_REWARDS, reward_model_folders, with_folder, without_folder
from modelwright.reward.build import build_reward
from modelwright.reward.reward import Sample
from refusals import config_error

HEAD = "score"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp("reward"), tiny_rollouts.model(seed=4)
    model.heads[HEAD] = nn.Linear(model.config.model_dim, 1, bias=False)
    nn.init.normal_(model.heads[HEAD].get_parameter("weight"))
    tokenizer = tiny_rollouts.tokenizer()
    pad = tokenizer.id_of("<|pad|>")
    assert pad is not None
    save_sequence_classifier(model, path, head=HEAD, label="reward", eos_id=tokenizer.eos_id, pad_id=pad)
    tokenizer.save(path)
    return path


def alone(folder: Path, ids: list[int]) -> float:
    """The head's output at the last token of one conversation."""
    model = load_sequence_classifier(folder, head=HEAD)
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], causal_attend())
        return float(model.heads[HEAD](hidden[0, -1]))


def sample(answer: str, finish_reason: str = "stop") -> Sample:
    turn = {"role": "user", "content": "ab"}
    return Sample(prompt=[turn], answer=answer, num_tokens=len(answer) + 1, finish_reason=finish_reason)


def test_it_scores_conversations_as_the_model_does(folder: Path) -> None:
    reward = build_reward({"taste": {"kind": "model", "path": str(folder), "weight": 0.5}}, kinds=MODEL_REWARDS)
    samples = [sample("x"), sample("a longer answer"), sample("cut o", "length"), sample("z" * 80)]
    scores = reward.score(samples)
    tokenizer = tiny_rollouts.tokenizer()
    prompt = tokenizer.chat.encode_prompt(samples[0].prompt)
    ended = [[*prompt, *tokenizer.encode(one.answer), tokenizer.end_id] for one in samples[:2]]
    for ids, score in zip([*ended, [*prompt, *tokenizer.encode("cut o")]], scores, strict=False):
        assert score.value == pytest.approx(0.5 * alone(folder, ids), abs=1e-5)
    assert scores[3].failed
    assert "too_long" in scores[3].outcome


def test_an_empty_answer_has_a_score(folder: Path) -> None:
    reward = build_reward({"model": {"path": str(folder)}}, kinds=MODEL_REWARDS)
    tokenizer, (score,) = tiny_rollouts.tokenizer(), reward.score([sample("")])
    prompt = tokenizer.chat.encode_prompt(sample("").prompt)
    assert score.value == pytest.approx(alone(folder, [*prompt, tokenizer.end_id]), abs=1e-5)


def test_the_reward_model_of_a_run_takes_the_place_of_no_folder(folder: Path) -> None:
    terms = {"taste": {"kind": "model", "weight": 2.0}, "model": {"path": "x"}, "length": {"max_len": 3}}
    assert without_folder(terms) == ["taste"]
    filled = with_folder(terms, folder)
    assert filled == {**terms, "taste": {"kind": "model", "weight": 2.0, "path": str(folder)}}
    with config_error("rewards.model.path", match=r"rewards\.model\.path: names no folder"):
        build_reward({"model": {}}, kinds=MODEL_REWARDS)


def test_a_missing_folder_is_named() -> None:
    with config_error("rewards.model.path", match=r"rewards\.model\.path: no such folder: 'none'"):
        build_reward({"model": {"path": "none"}}, kinds=MODEL_REWARDS)


def test_folders_of_reward_models_are_found_among_the_terms() -> None:
    terms = {"model": {"path": "a"}, "taste": {"kind": "model", "path": "b"}, "length": {"max_len": 3}, "bad": 1}
    assert reward_model_folders(terms) == {"rewards.model.path": "a", "rewards.taste.path": "b"}
