"""Sequences of different adapters in one batch: each is computed as by a model that has its adapter alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.core.config import ModelError
from modelwright.infer.engine import Engine, EngineConfig, StepOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapter_bank import load_adapters
from modelwright.model.adapters import attach_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.peft_folder import load_adapter, save_adapter
from refusals import config_error
from tiny_decoder import make_decoder

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "poet": {"r": 4, "lora_alpha": 40.0},
    "coder": {"r": 3, "use_dora": True, "target_modules": ("attention",)},
    "clerk": {"r": 5, "use_rslora": True, "target_modules": ("down_proj", "q_proj")},
}
NAMES = ("", *SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        model = make_decoder()
        attach_adapters(model, AdapterConfig(**settings), seed)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("lora_B", "magnitude")):
                    parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
        save_adapter(model, root / name)
    return {name: root / name for name in SETTINGS}


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 96 for place in range(3 + 5 * number)]


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def served(model: Decoder, folders: dict[str, Path]) -> Engine:
    return Engine(model.eval(), EngineConfig(), adapters=load_adapters(model, folders))


def test_a_batch_of_several_adapters_is_each_of_them_alone(folders: dict[str, Path]) -> None:
    engine = served(make_decoder(), folders)
    for number, name in enumerate(NAMES * 2):
        engine.add(f"{number}", prompt(number), GREEDY, adapter=name)
    together, by_name = drain(engine), dict[str, list[int]]()
    for number, name in enumerate(NAMES * 2):
        model = make_decoder()
        if name:
            load_adapter(model, folders[name])
        alone = Engine(model.eval(), EngineConfig())
        alone.add("0", prompt(number), GREEDY)
        wanted, found = drain(alone)["0"], together[f"{number}"]
        assert [output.token_id for output in found] == [output.token_id for output in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        by_name.setdefault(name, []).extend(output.token_id for output in wanted)
    assert len({tuple(tokens) for tokens in by_name.values()}) == len(NAMES)


def test_what_others_use_changes_no_bit(folders: dict[str, Path]) -> None:
    engine = served(make_decoder(), folders)
    assert engine.is_batch_invariant
    for number, name in enumerate(NAMES):
        engine.add(name, prompt(number), GREEDY, adapter=name)
    together = drain(engine)
    for number, name in enumerate(NAMES):
        engine.add(name, prompt(number), GREEDY, adapter=name)
        assert drain(engine)[name] == together[name]


def test_outside_of_the_engine_the_model_is_the_base(folders: dict[str, Path]) -> None:
    model, plain = make_decoder(), make_decoder()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    engine = served(model, folders)
    engine.add("0", prompt(1), GREEDY, adapter="poet")
    drain(engine)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x = torch.randn(2, 5, 32)
    attention, twin = (one.projections()["blocks.0.attention.q_proj"] for one in (model, plain))
    assert torch.equal(attention(x), twin(x))


def test_unknown_names_and_foreign_adapters_are_refused(folders: dict[str, Path]) -> None:
    engine = served(make_decoder(), folders)
    with config_error("adapter", match="adapter: 'pirate' is unknown; choose from poet, coder, clerk"):
        engine.add("0", prompt(1), GREEDY, adapter="pirate")
    with config_error("adapter", match="'pirate' is unknown; choose from none are loaded"):
        Engine(make_decoder(), EngineConfig()).add("0", prompt(1), GREEDY, adapter="pirate")
    other = make_decoder()
    other.init_weights(5)
    with pytest.raises(ModelError, match="belongs to other weights"):
        load_adapters(other, folders)
    with config_error("adapters", match="'' is the name of the model itself"):
        load_adapters(make_decoder(), {"": folders["poet"]})


def run(engine: Engine, name: str, number: int) -> list[StepOutput]:
    engine.add("0", prompt(number), GREEDY, adapter=name)
    return drain(engine)["0"]


def test_adapters_that_come_and_go_change_no_bit_of_others(folders: dict[str, Path]) -> None:
    model = make_decoder()
    engine, adapters = served(model, {}), load_adapters(model, folders)
    base = run(engine, "", 4)
    engine.add_adapter("poet", adapters["poet"])
    poet = run(engine, "poet", 4)
    assert [output.token_id for output in poet] != [output.token_id for output in base]
    engine.add("poet", prompt(4), GREEDY, adapter="poet")
    outputs = engine.step() + engine.step()
    engine.add_adapter("coder", adapters["coder"])
    engine.add_adapter("clerk", adapters["clerk"])
    engine.add("coder", prompt(2), GREEDY, adapter="coder")
    outputs += engine.step()
    engine.remove_adapter("poet")
    with config_error("adapter", match="'poet' is unknown; choose from coder, clerk"):
        engine.add("1", prompt(1), GREEDY, adapter="poet")
    outputs += [output for output in drain(engine)["poet"] if output not in outputs]
    unnamed = [(one.token_id, one.logprob) for one in outputs if one.request_id == "poet"]
    assert unnamed == [(one.token_id, one.logprob) for one in poet]
    assert run(engine, "", 4) == base
    banks = [module.adapter for module in model.projections().values()]
    assert not any(1 in bank.parts for bank in banks if bank is not None), "its last answer has ended"


def test_an_adapter_under_a_name_of_before_shares_no_prompt(folders: dict[str, Path]) -> None:
    model, long = make_decoder(), [3 + number % 40 for number in range(60)]
    engine = Engine(model.eval(), EngineConfig(prefill_chunk_size=16))
    adapters = load_adapters(model, folders)

    def first(name: str) -> StepOutput:
        engine.add("0", long, SamplingParams(max_tokens=1, temperature=0.0), adapter=name)
        return drain(engine)["0"][0]

    assert [first(""), first("")][1].num_cached_tokens > 0
    engine.add_adapter("now", adapters["poet"])
    assert (first("now").num_cached_tokens, first("now").num_cached_tokens > 0) == (0, True)
    engine.remove_adapter("now")
    engine.add_adapter("now", adapters["coder"])
    again = first("now")
    assert again.num_cached_tokens == 0
    with config_error("adapters", match="'now' is in use"):
        engine.add_adapter("now", adapters["coder"])
    alone = Engine(make_decoder().eval(), EngineConfig(prefill_chunk_size=16))
    alone.add_adapter("coder", load_adapters(alone.model, folders)["coder"])
    alone.add("0", long, SamplingParams(max_tokens=1, temperature=0.0), adapter="coder")
    assert drain(alone)["0"][0].logprob == again.logprob


def test_verified_guesses_have_the_adapter_of_their_sequence(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    text, found = (prompt(2) * 4)[:45], []
    for num_guesses in (0, 4):
        model = make_decoder()
        engine = Engine(
            model.eval(), EngineConfig(num_speculative_tokens=num_guesses), adapters=load_adapters(model, folders)
        )
        for name in NAMES:
            engine.add(name, text, params, adapter=name)
        found.append({name: [(o.token_id, o.logprob) for o in outputs] for name, outputs in drain(engine).items()})
        assert (engine.stats().num_accepted_tokens > 0) == (num_guesses > 0)
    assert found[0] == found[1]
