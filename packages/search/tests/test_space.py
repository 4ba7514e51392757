"""Spaces: every candidate is legal, and a user's own values are checked."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError
from modelwright.model.decoder import Decoder
from modelwright.recipes.load import recipe
from modelwright_search.space import architecture, hyperparameters, kind_of, num_kv_heads, space_of
from modelwright_search.strategies.scaled import scaled_choices

TINY = recipe("tiny")


@pytest.mark.parametrize("name", ["tiny", "quickstart", "arithmetic"])
def test_every_shape_is_one_that_a_model_can_have(name: str) -> None:
    config = recipe(name)
    space = architecture(config.model, config.first_training)
    assert space.candidate(space.standard_choices).model == config.model
    dice = random.Random(0)
    for _ in range(300):
        choices = {axis.name: dice.choice(axis.values) for axis in space.axes}
        shape = space.candidate(choices).model
        assert shape.num_heads % shape.num_kv_heads == 0
        assert shape.head_dim == config.model.head_dim
        assert choices["attention"] in (kind_of(shape), "gqa", "mqa")  # with one or two heads kinds are the same
        assert shape.vocab_size == config.model.vocab_size
    Decoder(shape)


def test_the_runs_own_shape_keeps_its_number_of_key_value_heads() -> None:
    """It is a `gqa`, and other candidates with as many heads have half as many key/value heads."""
    model = replace(TINY.model, num_heads=8, num_kv_heads=2, head_dim=TINY.model.head_dim)
    space = architecture(model, TINY.first_training)
    assert space.candidate(space.standard_choices).model == model
    wider = space.candidate({**space.standard_choices, "ffn": 2 * model.ffn_dim})
    assert (wider.model.num_heads, wider.model.num_kv_heads) == (8, 4)


def test_key_value_heads_of_kinds() -> None:
    assert [num_kv_heads("mha", heads) for heads in (1, 4, 6)] == [1, 4, 6]
    assert [num_kv_heads("gqa", heads) for heads in (1, 2, 3, 4, 6, 9)] == [1, 1, 1, 2, 3, 3]
    assert num_kv_heads("mqa", 8) == 1


def test_batches_are_whole_rows_and_the_runs_own_values_are_among_them() -> None:
    training = TINY.first_training
    space = hyperparameters(TINY.model, training, 512)
    values = {axis.name: axis.values for axis in space.axes}
    assert all(batch % 512 == 0 for batch in values["batch_tokens"])
    assert all(value in values[name] for name, value in space.standard_choices.items())
    candidate = space.candidate({**space.standard_choices, "learning_rate": 1e-4})
    assert space.settings(candidate, "pretrain") == {"pretrain": {"learning_rate": 1e-4}}


def test_scaled_shapes_keep_words_and_proportions() -> None:
    space = architecture(TINY.model, TINY.first_training)
    assert scaled_choices(space.standard_choices, 1.0) == space.standard_choices
    doubled = scaled_choices(space.standard_choices, 2.0)
    assert doubled == {"layers": 4, "width": 128, "heads": 8, "attention": "gqa", "gate": "none", "ffn": 256}
    assert space.candidate(scaled_choices(space.standard_choices, 0.05)).model.num_layers == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("layer: [1]", "layer: unknown axis; did you mean 'layers'"),
        ("layers: 3", "layers: must be a list of values"),
        ("attention: [linear]", "attention: 'linear' is not one of mha, gqa, mqa"),
        ("layers: [two]", "layers: 'two' is not of the kind of"),
        ("width: [0]", "width: 0 makes no model or training .model_dim: must be at least 1"),
        ("space: hyperparameters\nlearning_rate: [-1]", "learning_rate: -1.0 makes no model or training"),
        ("space: layers", "space: 'layers' is not one of architecture, hyperparameters"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error) as refused:
        space_of(str(path), TINY.model, TINY.first_training, 512)
    assert str(refused.value).startswith(f"{path}: ")


def test_values_of_a_file_are_sorted_and_replace_those_of_the_axis(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("layers: [6, 2, 4, 2]\nattention: [mqa, mha]")
    space = space_of(str(path), TINY.model, TINY.first_training, 512)
    values = {axis.name: axis.values for axis in space.axes}
    assert values["layers"] == (2, 4, 6)
    assert values["attention"] == ("mqa", "mha")
    assert values["gate"] == ("none", "head", "element")
