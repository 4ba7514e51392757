"""The rule of the claim about the demo's recipe, and its nanoGPT."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright_claims import demo_recipe, nano_gpt
from modelwright_claims.claim import Measurement, Verdict
from modelwright_claims.demo_recipe import BEFORE, EQUAL, KINDS, NANO, TODAY, WHOLE
from modelwright_claims.judging import judge

JOB = nano_gpt.NanoJob(
    rows="", vocab_size=32, num_layers=2, num_heads=2, model_dim=32, batch_rows=4, learning_rate=1e-2, seconds=2.0,
    seed=0, threads=1, bf16=False, compiles=False,
)  # fmt: skip


def verdict(changes: dict[str, list[float]], has_bf16: bool = True) -> Verdict:
    samples: dict[str, list[float]] = {}
    for kind in KINDS:
        samples |= {f"{kind}, {TODAY}": [1.70, 1.71, 1.72], f"{kind}, {BEFORE}": [1.90, 1.90, 1.91]}
        samples |= {f"{kind}, {EQUAL}": [1.80, 1.80, 1.82], f"{kind}, {WHOLE}": [1.53, 1.531]}
    samples |= {f"nats, {TODAY}": [4.0, 4.0, 4.1], f"nats, {NANO}": [5.2, 5.3, 5.2]}
    for name in (TODAY, BEFORE, EQUAL, WHOLE, NANO):
        samples |= {f"seconds, {name}": [1.0, 1.0], f"tokens, {name}": [1.0, 1.0]}
        samples.setdefault(f"nats, {name}", [1.0, 1.0])
    samples |= {demo_recipe.OWN_PARAMETERS: [100.0], f"parameters, {NANO}": [101.0, 101.0]}
    conditions = {"BF16 instructions": has_bf16}
    return judge(demo_recipe.CLAIM, Measurement(samples=samples | changes, conditions=conditions))


def test_every_part_of_the_target_is_asked_for() -> None:
    met = verdict({})
    assert met.kind == "met", met.reason
    assert set(demo_recipe.CLAIM.headline) <= set(met.figures)
    for name, values, words in (
        (f"prose, {TODAY}", [1.80, 1.81, 1.80], "prose, below the recipe before"),
        (f"code, {EQUAL}", [1.93, 1.93, 1.93], "code, below the recipe before at equal tokens"),
        (f"code, {WHOLE}", [1.57, 1.571], "code"),
        (f"nats, {NANO}", [4.5, 4.6, 4.5], "below nanoGPT"),
        (f"parameters, {NANO}", [99.0, 99.0], "nanoGPT has 99 parameters"),
    ):
        found = verdict({name: values})
        assert found.kind == "short"
        assert words in found.reason


def test_one_run_in_the_time_of_the_demo_is_no_bound() -> None:
    assert verdict({f"code, {WHOLE}": [1.5]}).kind == "not judged"


def test_without_bf16_instructions_no_figure_of_the_whole_demo_is_asked_for() -> None:
    assert verdict({f"code, {WHOLE}": [1.9]}, has_bf16=False).kind == "met"


@pytest.mark.parametrize("num_parameters", [10_000, 40_000, 41_000])
def test_nano_gpt_has_no_fewer_parameters(num_parameters: int) -> None:
    model = SimpleNamespace(num_parameters=num_parameters, vocab_size=32, model_dim=32)
    num_layers = demo_recipe.layers_of_nano(model)  # type: ignore[arg-type]
    sizes = [
        sum(weights.numel() for weights in nano_gpt.NanoGpt(replace(JOB, num_layers=number), seq_len=8).parameters())
        for number in (num_layers, num_layers - 1)
    ]
    assert sizes[0] >= num_parameters
    assert sizes[1] < num_parameters or num_layers == 1


def test_nano_gpt_sees_nothing_that_follows() -> None:
    torch.manual_seed(0)
    model = nano_gpt.NanoGpt(JOB, seq_len=8)
    ids = torch.randint(32, (2, 8))
    other = ids.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 32
    torch.testing.assert_close(model(ids)[:, :5], model(other)[:, :5])
    assert not torch.allclose(model(ids)[:, 5:], model(other)[:, 5:])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards, 31 at the end of each."""
    folder = tmp_path_factory.mktemp("rows")
    for split, first in (("train", 0), ("heldout", 3)):
        texts = [[(first + start + place) % 30 for place in range(20)] + [31] for start in range(0, 60, 2)]
        pack(((ids, None) for ids in texts), folder / split, PackConfig(seq_len=32), vocab_size=32, eos_id=31)
    return folder


def test_nano_gpt_reads_documents_without_padding(rows: Path) -> None:
    tokens = nano_gpt.stream(PackedRows(rows / "train"))
    assert len(tokens) == 30 * 21
    assert (tokens == 31).sum() == 30


def test_nano_gpt_learns_in_the_time_that_it_has(rows: Path) -> None:
    job = replace(JOB, rows=str(rows))
    found = nano_gpt.run(job)
    untrained = nano_gpt.run(replace(job, seconds=0.0))
    assert untrained["steps"] == 1
    assert untrained["loss"] > 3.0
    assert found["loss"] < 0.5 * untrained["loss"], "in two seconds, of which other tests take a part"
    assert found["tokens"] == found["steps"] * 4 * 32
