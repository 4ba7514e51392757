"""Embeddings and scores against a plain pass over the whole text, and in any company."""

import pytest
import torch

from infer.engine_runs import drain, make_engine, make_model, tokens
from modelwright.infer.sequence import Pooling, SamplingParams
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from refusals import config_error

TEXTS = [tokens(count, count) for count in (1, 7, 16, 40, 75)]
KINDS: tuple[Pooling, ...] = ("last", "mean")


def hidden_TD(model: Decoder, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text]), torch.arange(len(text))[None], causal_attend())[0].double()


def naive(model: Decoder, text: list[int], kind: Pooling) -> torch.Tensor:
    hidden = hidden_TD(model, text)
    chosen = hidden[-1] if kind == "last" else hidden.mean(dim=0)
    return (chosen / chosen.norm()).float()


def test_embeddings_are_pooled_hidden_states_whatever_else_runs() -> None:
    model = make_model()
    engine = make_engine(model)
    for _ in range(2):  # the second time beginnings are in the cache
        for number, text in enumerate(TEXTS):
            for kind in KINDS:
                engine.embed(f"{kind} {number}", text, pooling=kind)
            engine.add(f"answer {number}", text, SamplingParams(max_tokens=5))
        together = drain(engine)
        for number, text in enumerate(TEXTS):
            for kind in KINDS:
                (output,) = together[f"{kind} {number}"]
                assert torch.tensor(output.embedding) == pytest.approx(naive(model, text, kind), abs=1e-5)
                lone = make_engine(model)
                lone.embed("0", text, pooling=kind)
                assert drain(lone)["0"][0].embedding == output.embedding
    assert engine.stats().num_prefix_hits > 0


def test_a_scorer_scores_and_does_nothing_else() -> None:
    model = make_model()
    with config_error("pooling"):
        make_engine(model).embed("0", TEXTS[0], pooling="score")
    model.heads["score"] = torch.nn.Linear(model.config.model_dim, 1, bias=False)
    engine = make_engine(model)
    for number, text in enumerate(TEXTS):
        engine.embed(str(number), text, pooling="score")
    outputs = drain(engine)
    for number, text in enumerate(TEXTS):
        wanted = hidden_TD(model, text)[-1] @ model.heads["score"].weight[0].detach().double()
        assert outputs[str(number)][0].embedding == (pytest.approx(float(wanted), abs=1e-5),)
    with config_error("prompt", match="scores texts and generates none"):
        engine.add("0", TEXTS[1], SamplingParams())
    with config_error("num_speculative_tokens", match="num_speculative_tokens: this model scores texts"):
        make_engine(model, num_speculative_tokens=2)


def test_broken_weights_give_an_error_and_no_embedding() -> None:
    model = make_model()
    model.norm.weight.data[3] = torch.nan
    engine = make_engine(model)
    engine.embed("0", TEXTS[1], pooling="mean")
    (output,) = drain(engine)["0"]
    assert (output.finish_reason, output.embedding) == ("error", ())
