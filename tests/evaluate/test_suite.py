import json
from pathlib import Path

import pytest
import torch

from modelwright.compress.int8 import Int8WeightsConfig, quantize_model
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import TokenBatch
from modelwright.evaluate.scoring import EvaluateConfig, MultipleChoiceConfig
from modelwright.evaluate.suite import compare_evaluations, evaluate_model

CONFIG = EvaluateConfig(bootstrap_resamples=20, multiple_choice=MultipleChoiceConfig(num_questions=8))


@pytest.fixture
def documents(make_document) -> list:
    texts = [f"{word} walks to the {word * 2} and back. " * 9 for word in ("fox", "dog", "cat", "emu", "yak")]
    found = [make_document(id=f"t{i}", text=text, kind="code" if i % 2 else "prose") for i, text in enumerate(texts)]
    names = ["opens a door", "shuts both eyes", "paints some walls", "reads old letters", "bakes dark bread"]
    for i, name in enumerate(names):
        meta = {"question": f"What does `m{i}.f{i}` do?", "answer": f"{name} {i} times.", "module": f"m{i}"}
        found.append(make_document(id=f"q{i}", text=name, kind="qa", meta=meta))
    return found


def train_rows() -> list[TokenBatch]:
    ids = torch.tensor([list(b"fox walks to the dog and back. " * 4)])
    zeros = torch.zeros_like(ids)
    return [
        TokenBatch(input_ids_BT=ids, labels_BT=ids.roll(-1, 1), positions_BT=zeros, segments_BT=zeros.to(torch.int32))
    ]


def test_fp32_and_int8_models_go_through_the_same_suite(model, tokenizer, documents, tmp_path: Path) -> None:
    folders = {}
    for name, subject in {"fp32": model, "int8": quantize_model(model, Int8WeightsConfig(backend="int_mm"))}.items():
        folders[name] = tmp_path / name
        folders[name].mkdir()
        result = evaluate_model(
            subject,
            tokenizer,
            documents,
            CONFIG,
            train_rows=train_rows() if name == "fp32" else (),
            folder=folders[name],
            progress=SilentProgress(),
        )
        assert json.loads(json.dumps(result)) == result
        assert result["lossless"] is True
        assert set(result["bits_per_byte"]) == {"prose", "code"}
        assert result["answers"]["perplexity_low"] <= result["answers"]["perplexity"]
        assert result["multiple_choice"]["questions"] == 5
        assert len((folders[name] / "questions.jsonl").read_text().splitlines()) == 5
        if name == "fp32":
            assert set(result["baselines"]["bigram"]["kinds"]) == {"prose", "code"}
            assert set(result["baselines"]["compressors"]["code"]) == {"gzip", "xz"}
        else:
            assert result["baselines"] == {}
    change = compare_evaluations(folders["int8"], folders["fp32"], CONFIG)
    assert abs(change["bits_per_byte"]["code"]["difference"]) < 0.2
    assert change["bits_per_byte"]["code"]["low"] <= change["bits_per_byte"]["code"]["difference"]
    assert change["answers"]["low"] <= change["answers"]["difference"] <= change["answers"]["high"]
    assert change["multiple_choice"]["won"] + change["multiple_choice"]["lost"] <= 5
    (folders["int8"] / "documents.jsonl").write_text("")
    with pytest.raises(ValueError, match="same documents"):
        compare_evaluations(folders["int8"], folders["fp32"], CONFIG)
