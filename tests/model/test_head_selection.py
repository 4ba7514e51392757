"""Selected heads: against masking all heads' output, causality, generation, every layout, folders, and refusals."""

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.compress.gptq import gptq
from modelwright.compress.int8 import Int8WeightsConfig, load_int8, quantize_model, save_int8
from modelwright.compress.prune import prune
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapters import projection_sizes
from modelwright.model.attention import causal_attend, packed_attend
from modelwright.model.decoder import Attend, AttentionConfig, AttentionSpec, Decoder, ModelConfig
from modelwright.model.head_selection import BUDGET_WEIGHT, auxiliary_losses, decisions_seen
from modelwright.model.hf import deferred_model, load_model, save_model
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.ops.int_grid import WeightGrid
from modelwright.parallel.mesh import World, single
from modelwright.pipeline.exports.gguf import export_gguf_file
from modelwright.pipeline.exports.hf import export_hf
from modelwright.pipeline.models import FoundModel
from modelwright.serve.load import ModelSource
from modelwright.train import parallelize
from modelwright.train.objective import forward
from modelwright.train.precision.apply import names_of_projections
from refusals import config_error

BUDGET = 0.6
PLAIN: dict[str, Any] = {}
WINDOWS: dict[str, Any] = {"attention": AttentionConfig(window=5, window_layers=(1,))}
GATED: dict[str, Any] = {"attention_gate": "head"}


def shape(**changes: Any) -> ModelConfig:
    return replace(tiny_run.SHAPE, head_budget=BUDGET, **changes)


def selecting_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    model = Decoder(shape(**changes))
    model.init_weights(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if name.startswith("blocks") and parameter.dim() > 1 else 1.0)
    return model.to(dtype).eval()


def naive_attend(segments_BT: Tensor) -> Attend:
    """All heads, closed ones masked afterwards."""

    def attend(spec: AttentionSpec, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
        out_BTHd = masked_attention_naive(q_BTHd, k_BTKd, v_BTKd, document_mask(segments_BT, spec.window))
        assert spec.open_BTH is not None
        return out_BTHd * spec.open_BTH[..., None]

    return attend


@pytest.mark.parametrize("changes", [PLAIN, WINDOWS, GATED], ids=["plain", "windows", "gated"])
def test_all_gradients_are_those_of_the_naive_twin(changes: dict[str, Any]) -> None:
    """In FP64, on packed rows with grouped heads, the budget's term included."""
    model, batch = selecting_model(torch.float64, **changes), tiny_run.Rows().batch(3)
    for loss in auxiliary_losses(model):
        loss.begin_step(0.7, torch.device("cpu"))
    found = []
    for attend in (packed_attend(batch.segments_BT, model.config.windows), naive_attend(batch.segments_BT)):
        hidden_BTD = model(batch.input_ids_BT, batch.positions_BT, attend)
        loss = model.cross_entropy(hidden_BTD, batch.labels_BT, chunk_tokens=64)
        found.append([hidden_BTD, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_routers_gradient_is_the_straight_through_one() -> None:
    """For one layer it is written out: the sigmoid's derivative times what an open head is worth, plus the budget, for
    both query heads of a key/value head.
    """
    model = selecting_model(torch.float64)
    attention = model.blocks["1"].attention
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = model.rotary_tables(torch.arange(9).expand(2, -1))[:2]
    scale, whole = 0.3, []
    attention.head_selection.balance.begin_step(scale, torch.device("cpu"))
    inner = causal_attend()

    def attend(*inputs: Any) -> Tensor:
        whole.append(inner(*inputs))
        return whole[-1]

    logits = (x @ attention.head_router.weight.T).detach()[..., [0, 0, 1, 1]]
    is_open, soft = (logits > 0).double(), logits.sigmoid()
    found = attention(x, cos, sin, attend)
    expected = (whole[0] * is_open[..., None]).flatten(-2) @ attention.o_proj.weight.T
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), attention.head_router.weight)
    worth = ((2 * found @ attention.o_proj.weight).unflatten(-1, (4, 8)) * whole[0]).sum(-1)
    excess = is_open.mean(-1, keepdim=True) - BUDGET
    of_gates = worth * is_open + BUDGET_WEIGHT * scale * 2 * excess / 4
    of_heads = torch.einsum("bth,btd->hd", of_gates * soft * (1 - soft), x)
    torch.testing.assert_close(gradient, of_heads[0::2] + of_heads[1::2])
    assert 0 < is_open.mean() < 1


def test_later_tokens_change_nothing_before_them() -> None:
    model, batch = selecting_model(torch.float64), tiny_run.Rows().batch(3)
    segments_BT, ids_BT = torch.zeros_like(batch.segments_BT), batch.input_ids_BT.clone()
    positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)

    def logits() -> Tensor:
        with torch.no_grad():
            return model.logits(model(ids_BT, positions_BT, packed_attend(segments_BT)))

    before, cut = logits(), 17
    ids_BT[:, cut:] = (ids_BT[:, cut:] + 11) % tiny_run.VOCABULARY
    after = logits()
    torch.testing.assert_close(after[:, :cut], before[:, :cut], rtol=0, atol=1e-12)
    assert (after[:, cut:] - before[:, cut:]).abs().max() > 0.01


def test_shapes_count_the_router() -> None:
    model = selecting_model()
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert set(names_of_projections(model.config)) == set(model.projections())
    sizes = {name: tuple(projection.weight.shape) for name, projection in model.projections().items()}
    assert projection_sizes(model.config) == sizes
    more = model.config.flops_per_token(8.0) - tiny_run.SHAPE.flops_per_token(8.0)
    assert more == pytest.approx(2 * 2 * (32 * 2 - (1 - BUDGET) * 2 * 32 * 8))
    for wrong in (0.0, 1.5):
        with config_error("head_budget"):
            replace(tiny_run.SHAPE, head_budget=wrong)


@pytest.mark.parametrize("changes", [PLAIN, WINDOWS], ids=["plain", "windows"])
def test_generation_agrees_with_whole_rows(changes: dict[str, Any]) -> None:
    model, prompt = selecting_model(**changes), [5, 9, 40, 3, 8, 21, 11]
    (completion,) = generate(model, [prompt], [SamplingParams(max_tokens=6, temperature=0.0)])
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model.logits(model(ids, torch.arange(ids.shape[1])[None], causal_attend()))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == list(completion.token_ids)


LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"zero_stage": 3},
    {"pipeline": 2},
    {"context": 2},
    {"context": 2, "context_attention": "ring"},
]


def train(
    world: World, folder: Path, parallel: dict[str, Any], *, num_kv_heads: int = 2, **settings: Any
) -> dict[str, Tensor]:
    model = selecting_model(torch.float64, num_kv_heads=num_kv_heads)
    return tiny_run.weights_of_layout(model, folder, world, parallel, **settings)


def on_two_ranks(world: World, folder: Path) -> list[dict[str, Tensor]]:
    return [train(world, folder / str(number), one) for number, one in enumerate(LAYOUTS)]


def on_two_ranks_with_one_key_value_head(world: World, folder: Path) -> list[dict[str, Tensor]]:
    return [train(world, folder / str(number), one, num_kv_heads=1) for number, one in enumerate(LAYOUTS[:2])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(single(), tmp_path_factory.mktemp("alone"), {})


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_every_layout_trains_it_alike(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    name = "blocks.0.attention.head_router.weight"
    assert not torch.equal(trained[name], selecting_model(torch.float64).state_dict()[name])
    for rank in run_distributed(on_two_ranks, 2, tmp_path):
        for found in rank:
            assert_close(found, trained)


def test_ranks_that_share_a_key_value_head_share_its_decision(tmp_path: Path) -> None:
    wanted = train(single(), tmp_path / "alone", {}, num_kv_heads=1)
    for rank in run_distributed(on_two_ranks_with_one_key_value_head, 2, tmp_path):
        for found in rank:
            assert_close(found, wanted)


@pytest.mark.parametrize(
    "checkpointing",
    [
        {"mode": "full", "layers_per_segment": 1},
        {"mode": "selective", "save_outputs_of": ["attend"]},
    ],
    ids=["full", "selective"],
)
def test_recomputed_layers_decide_alike(
    tmp_path: Path, trained: dict[str, Tensor], checkpointing: dict[str, Any]
) -> None:
    assert_close(train(single(), tmp_path, {}, activation_checkpointing=checkpointing), trained)


@pytest.mark.slow
def test_compiled_layers_learn_alike(
    tmp_path: Path, trained: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = partial(parallelize.compile_each_block, backend="eager")
    monkeypatch.setattr(parallelize, "compile_each_block", eager)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")  # as in tests/architecture/test_pairs.py
        assert_close(train(single(), tmp_path, {}, compile=True), trained)
    torch.compiler.reset()


def shares(model: Decoder) -> Tensor:
    counts: list[Tensor] = []
    with torch.no_grad(), decisions_seen(model, lambda layer, open_BTH: counts.append(open_BTH.double().mean())):
        forward(model, tiny_run.Rows().batch(3))
    return torch.stack(counts)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.25, 0.85])
def test_the_budget_pulls_the_share_of_open_heads(tmp_path: Path, budget: float) -> None:
    model = Decoder(replace(tiny_run.SHAPE, head_budget=budget))
    model.init_weights(4)
    before = (shares(model) - budget).abs()
    settings = tiny_run.settings(**{**tiny_run.SHORT, "num_steps": 40})
    tiny_run.run(tmp_path, settings, model=model, heldout=[])
    after = (shares(model) - budget).abs()
    assert (before > 0.15).all()
    assert (after < 0.1).all(), after
    assert (tmp_path / "metrics.jsonl").read_text().count('"auxiliary_loss/head_budget"') == 40


def test_folders_keep_it_and_the_export_refuses_it(tmp_path: Path) -> None:
    model = selecting_model()
    save_model(model, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "modelwright"
    loaded = load_model(tmp_path / "m")
    assert loaded.config == model.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    found = FoundModel(ModelSource(name="m", folder=tmp_path / "m"))
    with config_error("model.head_budget"):
        export_hf(found, tmp_path / "exported", overwrite=False)
    with config_error("model.head_budget"):
        export_gguf_file(found, tmp_path / "m.gguf", number_format="f16", overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == {"m"}
    with config_error("hf_type", match="a gemma2 cannot have all features of this model"):
        save_model(Decoder(replace(model.config, hf_type="gemma2")), tmp_path / "other")


def test_a_model_whose_weights_are_read_later_has_its_own_loss(tmp_path: Path) -> None:
    save_model(selecting_model(), tmp_path / "m")
    losses = auxiliary_losses(deferred_model(tmp_path / "m"))
    assert len(losses) == 2
    for loss in losses:
        loss.begin_step(0.5, torch.device("cpu"))
        assert loss.scale == 0.5 * BUDGET_WEIGHT


def test_smaller_formats_take_it(tmp_path: Path) -> None:
    model, batch = selecting_model(), tiny_run.Rows().batch(3)
    config = Int8WeightsConfig(backend="int_mm")
    int8 = quantize_model(model, config)
    save_int8(int8, tmp_path)
    with torch.no_grad():
        assert torch.equal(forward(load_int8(tmp_path, config), batch), forward(int8, batch))
    assert "blocks.0.attention.head_router" in gptq(model, [batch], WeightGrid(bits=4))
    smaller = prune(model, replace(model.config, num_heads=2, num_kv_heads=1), {})
    rows = smaller.blocks["0"].attention.head_router.weight
    assert rows.shape == (1, 32)
    assert all((model.blocks["0"].attention.head_router.weight == row).all(dim=1).any() for row in rows)
