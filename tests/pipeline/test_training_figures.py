"""The samples that a training stage shows while it trains, and what the terminal shows at the end."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from modelwright.core.records import json_line, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.pipeline.stages.training import FILE, NUM_SHOWN, first_prompt, sample_block, text_samples


def one_row(labels: Sequence[int], segments: Sequence[int]) -> TokenBatch:
    count = len(labels)
    return TokenBatch(
        input_ids_BT=torch.arange(100, 100 + count)[None],
        labels_BT=torch.tensor([labels]),
        positions_BT=torch.arange(count)[None],
        segments_BT=torch.tensor([segments], dtype=torch.int32),
    )


def test_a_prompt_is_what_precedes_the_first_target() -> None:
    row = one_row([IGNORED, IGNORED, 7, 8, 9], [0] * 5)
    assert first_prompt([row]) == [100, 101, 102]


def test_text_is_continued_from_its_first_tokens_within_one_document() -> None:
    assert first_prompt([one_row([1] * 40, [0] * 40)]) == list(range(100, 116))
    assert first_prompt([one_row([1] * 40, [0] * 5 + [1] * 35)]) == list(range(100, 105))
    assert first_prompt([]) == []


def test_the_report_shows_samples_from_the_first_to_the_last(tmp_path: Path) -> None:
    assert not sample_block(tmp_path)
    for step in range(0, 90, 10):
        with open(tmp_path / FILE, "a") as file:
            file.write(json_line({"step": step, "loss": 2.0, "text": f"text {step}"}))
    (block,) = sample_block(tmp_path)
    assert [one.question for one in block.items] == ["Step 0", "Step 20", "Step 40", "Step 50", "Step 70", "Step 80"]
    assert len(block.items) == NUM_SHOWN
    assert block.items[-1].answer == "text 80"


class Clock:
    """Twenty-five seconds later each time that it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 25.0
        return self.now


def tiny_model(vocab_size: int, *, tie_embeddings: bool = True) -> Decoder:
    shape = ModelConfig(
        vocab_size=vocab_size, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=32,
        max_seq_len=64, tie_embeddings=tie_embeddings,
    )  # fmt: skip
    model = Decoder(shape)
    model.init_weights(seed=0)
    return model


def test_a_sample_of_the_first_step_one_a_minute_and_one_of_the_last(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def a(b): return b\n" * 20], TokenizerConfig(vocab_size=270))
    run = mock.MagicMock(model=tiny_model(tokenizer.vocab_size), num_steps=9)
    technique = text_samples(run, folder=tmp_path, tokenizer=tokenizer, prompt=[5, 6, 7], clock=Clock())
    assert technique is not None
    assert technique.on_step_end is not None
    for step in range(1, 10):
        technique.on_step_end(mock.MagicMock(step=step, loss=1.0))
    assert [one["step"] for one in read_records(tmp_path / FILE)] == [1, 4, 7, 9]
    assert run.note.call_args_list[0].args[0].startswith("step 1: ")


def test_a_sample_ends_where_the_answer_does(tmp_path: Path) -> None:
    """The last token decides the next one: the prompt is followed by a letter, the letter by the end of a turn or of
    the text, and the end by the letter again.
    """
    tokenizer = train_tokenizer(["def a(b): return b\n" * 20], TokenizerConfig(vocab_size=270))
    (letter,) = tokenizer.encode("x")
    assert len(tokenizer.stop_ids) == 2
    for stop in tokenizer.stop_ids:
        model = tiny_model(tokenizer.vocab_size, tie_embeddings=False)
        with torch.no_grad():
            for weight in model.blocks.parameters():
                weight.zero_()
            model.embedding.weight.zero_()
            model.head.weight.zero_()
            for axis, (token, following) in enumerate(((7, letter), (letter, stop), (stop, letter))):
                model.embedding.weight[token, axis] = 1.0
                model.head.weight[following, axis] = 100.0
        run = mock.MagicMock(model=model, num_steps=1)
        technique = text_samples(run, folder=tmp_path, tokenizer=tokenizer, prompt=[5, 6, 7])
        assert technique is not None
        assert technique.on_step_end is not None
        technique.on_step_end(mock.MagicMock(step=1, loss=1.0))
        assert [one["text"] for one in read_records(tmp_path / FILE)] == ["x"]


def test_samples_that_a_crash_left_are_made_again(tmp_path: Path) -> None:
    """The last line was cut off, and training goes on from an earlier step."""
    path = tmp_path / FILE
    path.write_text(json_line({"step": 10, "text": "a"}) + json_line({"step": 30, "text": "b"}) + '{"step": 40, "te')
    tokenizer = train_tokenizer(["def a(b): return b\n" * 20], TokenizerConfig(vocab_size=270))
    run = mock.MagicMock(model=tiny_model(tokenizer.vocab_size), num_steps=20)
    technique = text_samples(run, folder=tmp_path, tokenizer=tokenizer, prompt=[5, 6, 7])
    assert technique is not None
    assert technique.on_step_end is not None
    technique.on_step_end(mock.MagicMock(step=20, loss=1.0))
    first, second = read_records(path)
    assert (first["step"], first["text"], second["step"]) == (10, "a", 20)
    assert second["prompt"] == tokenizer.decode([5, 6, 7])
