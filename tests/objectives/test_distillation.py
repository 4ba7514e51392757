"""Distillation: its three parts against naive ones, teachers of other types, schedules, layouts, the cache, kills."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed import run_distributed, start_distributed
from hf_folders import write_folder
from modelwright.core.config import ConfigError, Stopped
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Attend, Decoder, ModelConfig
from modelwright.model.hf import load_model
from modelwright.objectives import teacher as teachers
from modelwright.objectives.distillation import (
    Distillation,
    DistillationSettings,
    LossPart,
    check_shapes,
    even_layer_map,
)
from modelwright.objectives.teacher import LOG_PROBS, TeacherCache, TeacherModel, num_relation_heads
from modelwright.ops.attention_divergence import relation_loss_naive
from modelwright.ops.distillation_loss import DivergenceKind, distillation_loss_naive
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.objective import forward
from modelwright.train.technique import Technique, Update
from refusals import config_error
from tolerances import TOLERANCES

TEACHER = replace(tiny_run.SHAPE, num_layers=3, model_dim=48, num_heads=6, num_kv_heads=3, ffn_dim=96)
EQUAL_HEADS = replace(TEACHER, num_heads=4, num_kv_heads=1, head_dim=16)
"""A teacher with as many heads as the student, wider ones over fewer keys."""
NUM_STEPS, TEMPERATURE, SHARE = 6, 2.5, 0.4
PHASES = {
    "hidden": LossPart(2.0, 0.0, 0.34),
    "attention": LossPart(0.5, 0.2, 0.7),
    "logits": LossPart(1.0, 0.5, 1.0),
}
"""In six steps: hidden is learned from 0 to 2, attention from 2 to 4, logits from 3 to 5."""
LOGITS_ONLY = {"logits": LossPart(1.0)}


def teacher_of(
    world: World, dtype: torch.dtype, *, sharded: bool = False, shape: ModelConfig = TEACHER
) -> TeacherModel:
    model = Decoder(shape)
    model.init_weights(7)
    with torch.no_grad():
        for parameter in model.parameters():  # as sharp as a trained one
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return TeacherModel.of(model.to(dtype), world, sharded=sharded)


def make(
    world: World,
    parts: Any = PHASES,
    *,
    dtype: torch.dtype = torch.float64,
    cache: Path | None = None,
    sharded: bool = False,
    shape: ModelConfig = TEACHER,
    **settings: Any,
) -> Distillation:
    teacher = teacher_of(world, dtype, sharded=sharded, shape=shape)
    stored = None
    if cache is not None:
        stored = TeacherCache(teacher=teacher, folder=cache, temperature=TEMPERATURE, top_k=5, rank=world.rank)
    chosen = {"parts": parts, "temperature": TEMPERATURE, "label_share": SHARE, "chunk_tokens": 50, **settings}
    return Distillation(
        source=tiny_run.Rows(),
        teacher=teacher,
        settings=DistillationSettings(**chosen),
        num_steps=NUM_STEPS,
        cache=stored,
    )


def attach(model: Decoder, objective: Distillation) -> Decoder:
    torch.manual_seed(5)
    for name, module in objective.own_modules(model.config).items():
        model.heads[name] = module.to(model.head_weight.dtype)
    return model


def naive_forward(model: Decoder, batch: Any) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """Hidden states after the last norm, and of every layer its output and its queries, keys and values."""
    seen: list[list[Tensor]] = []
    plain = packed_attend(batch.segments_BT, model.config.windows)

    def keep(*inputs: Any) -> Tensor:
        seen.append(list(inputs[1:]))
        return plain(*inputs)

    attend: Attend = keep
    hidden, outputs = model.embed(batch.input_ids_BT, batch.positions_BT), []
    rotary = model.rotary_tables(batch.positions_BT)
    for block in model.blocks.values():
        hidden = block(hidden, *rotary.of(block), attend)
        outputs.append(hidden)
    return model.norm(hidden), outputs, seen


def naive_attention(
    model: Decoder, objective: Distillation, own: list[list[Tensor]], its: list[list[Tensor]], batch: Any
) -> Tensor:
    """The sum over tokens, of the last layers."""
    number = num_relation_heads(model.config, objective.teacher.config)
    pairs = zip(own[-1], its[-1], strict=True)
    relations = [
        relation_loss_naive(one.flatten(2), other.flatten(2), batch.segments_BT, num_heads=number)
        for one, other in pairs
    ]
    return torch.stack(relations).sum() / (3 * number)


def naive_losses(model: Decoder, objective: Distillation, batch: Any, step: int) -> dict[str, Tensor]:
    """The normalized terms by their definitions."""
    teacher, settings = objective.teacher.frozen.executor.model, objective.settings
    with torch.no_grad():
        their_last, their_outputs, their_heads = naive_forward(teacher, batch)
    last, outputs, heads = naive_forward(model, batch)
    real, progress = batch.segments_BT >= 0, step / NUM_STEPS
    values: dict[str, Tensor] = {}
    if "hidden" in settings.parts:
        gaps = [
            model.heads[f"distillation_{own}"](outputs[own]) - their_outputs[layer]
            for own, layer in enumerate(settings.layer_map or even_layer_map(2, 3))
            if layer >= 0
        ]
        values["hidden"] = torch.stack([gap[real].square().mean() for gap in gaps]).mean()
    if "attention" in settings.parts:
        values["attention"] = naive_attention(model, objective, heads, their_heads, batch) / real.sum()
    if "logits" in settings.parts:
        logits = distillation_loss_naive(
            last.flatten(0, 1),
            model.head_weight,
            teacher.logits(their_last).flatten(0, 1),
            batch.labels_BT.flatten(),
            temperature=TEMPERATURE,
            label_share=SHARE,
            kind=settings.divergence,
        )
        values["logits"] = logits / (batch.labels_BT >= 0).sum()
    return {name: value * settings.parts[name].at(progress) for name, value in values.items()}


def assert_equals_naive(objective: Distillation, step: int) -> None:
    """The terms of a batch, and all gradients."""
    model = attach(tiny_run.tiny_model(torch.float64), objective)
    batches = objective.batches(model, first=step, rank=0, world_size=1)  # whose end ends the reading of layers
    batch = next(batches)
    weights, found = objective.weights(batch), objective.losses(forward(model, batch), batch, model).losses
    ours = {name: loss / max(1, int(weights[name])) for name, loss in found.items()}
    naive = naive_losses(model, objective, tiny_run.Rows().batch(step), step)
    assert [name for name in naive if naive[name] > 0] == [name for name in ours if weights[name] > 0]
    torch.testing.assert_close(ours, {name: value.to(ours[name].dtype) for name, value in naive.items()})
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [
        torch.autograd.grad(
            torch.stack([*losses.values()]).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        for losses in (ours, naive)
    ]
    for name, fast, slow in zip(names, *gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert any(bool(gradient.any()) for gradient in gradients[0])


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_losses_and_gradients_equal_naive_ones(step: int) -> None:
    assert_equals_naive(make(single()), step)


@pytest.mark.slow
@pytest.mark.parametrize("layer_map", [(), (0, 2), (1, 1), (2, -1)])
def test_mapped_layers_equal_naive_ones(layer_map: tuple[int, ...]) -> None:
    """Steps of hidden states and attention, and of attention and logits."""
    for step in (2, 3):
        assert_equals_naive(make(single(), shape=EQUAL_HEADS, layer_map=layer_map), step)


@pytest.mark.parametrize("name", ["reverse_kl", "jsd"])
def test_other_divergences_equal_naive_ones(name: Any) -> None:
    assert_equals_naive(make(single(), divergence=DivergenceKind(name=name, beta=0.3)), 4)


HF_TEACHERS = ("gemma2", "gemma3", "phi3-window", "qwen3", "llama-biased", "mistral")


@pytest.mark.slow
@pytest.mark.parametrize("name", HF_TEACHERS)
def test_a_teacher_from_a_folder_of_another_type_teaches_what_it_computes(name: str, tmp_path: Path) -> None:
    """Its predictions are those of `transformers`, and all three parts are those of the definitions: soft caps, sliding
    windows, biases, norms and scales of its own are its own affair.
    """
    theirs = write_folder(name, tmp_path, vocab_size=tiny_run.VOCABULARY)
    teacher = TeacherModel.of(load_model(tmp_path).to(torch.float64), single())
    batch = tiny_run.Rows().batch(0)
    logits_NV = teacher.output(batch).hidden_BTE.flatten(0, 1) @ teacher.head_VE.T
    soft_cap = teacher.config.logit_soft_cap
    logits_NV = soft_cap * (logits_NV / soft_cap).tanh() if soft_cap else logits_NV
    row, document = 0, batch.segments_BT[0] == 0
    with torch.no_grad():
        expected_TV = theirs(batch.input_ids_BT[row, document][None]).logits[0]
    torch.testing.assert_close(logits_NV[:32][document].float(), expected_TV, **TOLERANCES["fp32_logits"])
    for step in (2, 4):
        objective = make(single(), PHASES)
        objective.teacher = teacher
        assert_equals_naive(objective, step)


def test_hooks_go_with_the_batches() -> None:
    objective, model = make(single()), tiny_run.tiny_model(torch.float64)
    batches = objective.batches(attach(model, objective), first=0, rank=0, world_size=1)
    next(batches)
    assert model._forward_pre_hooks
    batches.close()
    assert not model._forward_pre_hooks
    assert not any(block._forward_hooks or block.attention._forward_pre_hooks for block in model.blocks.values())


def train(
    world: World,
    folder: Path,
    objective: Distillation,
    *,
    parallel: Any = None,
    changes: Any = None,
    stop: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Train six steps; the final weights by name, and the record of figures."""
    torch.set_num_threads(1)
    model, found = tiny_run.tiny_model(dtype), {}

    def keep(update: Update) -> None:
        for name, value in {**update.losses, **update.metrics}.items():
            if name != "executed_flops":
                found[f"{update.step}/{name}"] = torch.tensor(value, dtype=torch.float64)

    changes = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 1, "eval_every_steps": 3, **(changes or {})}
    tiny_run.run(
        folder,
        tiny_run.settings(**changes),
        model=model,
        objective=objective,
        world=world,
        techniques=[
            tiny_run.always(Technique(name="keep", on_gradients=keep, needs=frozenset())),
            *tiny_run.watching(stop=tiny_run.StopAfter(stop)),
        ],
        parallel=ParallelConfig(**(parallel or {})),
        heldout=[tiny_run.Rows().batch(900)],
    )
    return found | {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], layout: str) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{layout}, {name}: {text}"
        )


SHORT = {"num_steps": 2, "eval_every_steps": 0, "checkpoint_every_steps": 0}
WITH_HIDDEN = {"hidden": LossPart(1.0), "logits": LossPart(1.0)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"changes": SHORT},
    "zero 3": {"parallel": {"zero_stage": 3}},
    "zero 3, mapped": {"parallel": {"zero_stage": 3}, "settings": {"shape": EQUAL_HEADS, "layer_map": (0, 2)}},
    "tensor, reverse": {
        "parallel": {"tensor": 2},
        "parts": LOGITS_ONLY,
        "changes": SHORT,
        "settings": {"divergence": DivergenceKind(name="reverse_kl")},
    },
    "tensor, mixture": {
        "parallel": {"tensor": 2},
        "parts": LOGITS_ONLY,
        "changes": SHORT,
        "settings": {"divergence": DivergenceKind(name="jsd", beta=0.3)},
    },
    "tensor": {"parallel": {"tensor": 2, "sequence_parallel": False}, "parts": WITH_HIDDEN, "changes": SHORT},
    "context": {"parallel": {"context": 2}, "parts": WITH_HIDDEN, "changes": SHORT},
    "tensor, cache": {"parallel": {"tensor": 2}, "parts": LOGITS_ONLY, "changes": SHORT, "caches": True},
    "pipeline": {
        "parallel": {"pipeline": 2},
        "parts": LOGITS_ONLY,
        "changes": {"gradient_accumulation_steps": 2, **SHORT},
        "caches": True,
    },
}


def run_layout(world: World, folder: Path, name: str) -> dict[str, Tensor]:
    """One of `LAYOUTS`; a single process leaves the layout out."""
    layout, parallel = LAYOUTS[name], LAYOUTS[name].get("parallel", {}) if world.size > 1 else {}
    cache = folder / f"cache-{name}" if layout.get("caches") else None
    settings = layout.get("settings", {})
    objective = make(world, layout.get("parts", PHASES), cache=cache, sharded="zero_stage" in parallel, **settings)
    return train(world, folder / name, objective, parallel=parallel, changes=layout.get("changes"))


def run_layouts(world: World, folder: Path) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    refused = []
    for number, (parts, parallel) in enumerate(REFUSED):
        with pytest.raises(ConfigError) as error:
            train(world, folder / f"refused-{number}", make(world, parts), parallel=parallel)
        refused.append(str(error.value))
    return {name: run_layout(world, folder, name) for name in LAYOUTS}, refused


HIDDEN, ATTENTION = {"hidden": LossPart(1.0)}, {"attention": LossPart(1.0)}
REFUSED: list[tuple[Any, Any]] = [
    (HIDDEN, {"pipeline": 2}),
    (HIDDEN, {"tensor": 2, "sequence_parallel": True}),
    (ATTENTION, {"sequence_parallel": False, "tensor": 2}),
    (ATTENTION, {"context": 2}),
]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    alone = {name: run_layout(single(), tmp_path / "alone", name) for name in LAYOUTS}
    for found, refused in run_distributed(run_layouts, 2, tmp_path / "two"):
        for name in LAYOUTS:
            assert_close(alone[name], found[name], name)
        for text, (_, parallel) in zip(refused, REFUSED, strict=True):
            assert text.startswith("Distillation: needs"), text
            assert f"parallel.{next(reversed(parallel))}" in text


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(single(), tmp_path_factory.mktemp("unchanged"), make(single()), changes={"eval_every_steps": 0})


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 3},
        {"activation_checkpointing": {"mode": "full", "layers_per_segment": 2}},
        {"activation_checkpointing": {"mode": "selective"}},
    ],
)
def test_microbatches_and_recomputation_change_nothing(
    changes: dict[str, Any], unchanged: dict[str, Tensor], tmp_path: Path
) -> None:
    found = train(single(), tmp_path, make(single()), changes={"eval_every_steps": 0, **changes})
    assert_close(unchanged, found, str(changes))


def test_blocks_that_are_compiled_are_refused(tmp_path: Path) -> None:
    with config_error("Distillation"):
        train(single(), tmp_path, make(single(), HIDDEN), changes={"compile": True})


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def objective(name: str) -> Distillation:
        return make(single(), dtype=torch.float32, cache=tmp_path / name / "teacher")

    whole = train(single(), tmp_path / "whole", objective("whole"), dtype=torch.float32)
    with pytest.raises(Stopped):
        train(single(), tmp_path / "cut", objective("cut"), stop=4, dtype=torch.float32)
    resumed = train(single(), tmp_path / "cut", objective("cut"), dtype=torch.float32)
    assert "3/logits" not in resumed
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


DEFAULTS = {
    "hidden": LossPart(1.0, 0.0, 0.25),
    "attention": LossPart(1.0, 0.25, 0.5),
    "logits": LossPart(1.0, 0.5, 1.0),
}
NUM_PHASED = 12
"""Steps of a run in which each phase lasts three at least: hidden from 0, attention from 3, logits from 6."""


def train_phases(world: World, folder: Path, die_at: int = -1) -> dict[str, Tensor]:
    """die_at: the step, from 0, in whose forward pass the process dies by SIGKILL."""
    objective = make(world, DEFAULTS, dtype=torch.float32)
    objective.num_steps, losses, num_seen = NUM_PHASED, objective.losses, 0

    def count(output: Tensor, batch: Any, model: Decoder) -> Any:
        nonlocal num_seen
        num_seen += output.requires_grad
        if num_seen == die_at + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(output, batch, model)

    objective.losses = count if die_at >= 0 else losses
    return train(world, folder, objective, changes={"num_steps": NUM_PHASED}, dtype=torch.float32)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train_phases(single(), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "step"), [("hidden", 2), ("attention", 4), ("logits", 8)])
def test_a_run_that_is_killed_in_a_phase_goes_on_with_the_same_bits(
    phase: str, step: int, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    whole = uninterrupted
    assert [name for name in DEFAULTS if whole[f"{step}/{name}"] > 0] == [phase]
    (ended,) = start_distributed(train_phases, 1, tmp_path, step).wait()
    assert ended.code == -signal.SIGKILL
    resumed = train_phases(single(), tmp_path)
    assert f"{step}/{phase}" in resumed
    assert f"0/{phase}" not in resumed
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    assert "norm.weight" in resumed


def die_while_caching(world: World, folder: Path) -> None:
    """Die by SIGKILL in the fifth shard, half of which is written."""
    save, num_files = teachers.save_file, 0

    def save_half(tensors: Any, path: Path, **more: Any) -> None:
        nonlocal num_files
        save(tensors, path, **more)
        num_files += 1
        if num_files == 5:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    teachers.save_file = save_half
    train(world, folder, make(world, LOGITS_ONLY, dtype=torch.float32, cache=folder / "t"), dtype=torch.float32)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    (ended,) = start_distributed(die_while_caching, 1, cut).wait()
    assert ended.code == -signal.SIGKILL
    shards = sorted((cut / "t").glob("*.safetensors"))
    assert len(shards) == 4
    shards[0].write_bytes(shards[0].read_bytes()[:100])  # a damaged shard is computed again
    objective = make(single(), LOGITS_ONLY, dtype=torch.float32, cache=cut / "t")
    resumed = train(single(), cut, objective, dtype=torch.float32)
    objective = make(single(), LOGITS_ONLY, dtype=torch.float32, cache=tmp_path / "whole" / "t")
    whole = train(single(), tmp_path / "whole", objective, dtype=torch.float32)
    assert "0/logits" not in resumed
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_a_row_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = make(single(), LOGITS_ONLY, cache=tmp_path)
    cache, batch = objective.cache, tiny_run.Rows().batch(0)
    assert cache is not None
    first = cache.extras(batch)
    again = TeacherCache(teacher=objective.teacher, folder=tmp_path, temperature=TEMPERATURE, top_k=5)
    monkeypatch.setattr(TeacherModel, "top_tokens", lambda *_: pytest.fail("evaluated again"))
    order = torch.tensor([3, 0, 5])
    taken = again.extras(batch.take(order))
    assert all(torch.equal(values[order], taken[name]) for name, values in first.items())
    hidden = objective.teacher.output(batch).hidden_BTE
    logits = hidden @ objective.teacher.head_VE.T / TEMPERATURE
    torch.testing.assert_close(first[LOG_PROBS].double(), logits.log_softmax(-1).topk(5).values, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_student_becomes_like_its_teacher(tmp_path: Path) -> None:
    """The divergence falls to a fraction; labels alone leave it high."""
    divergences = {}
    for share in (0.0, 1.0):
        objective = make(single(), LOGITS_ONLY, dtype=torch.float32)
        objective.settings, objective.num_steps = replace(objective.settings, label_share=share), 40
        changes = {"num_steps": 40, "eval_every_steps": 0, "checkpoint_every_steps": 0}
        found = train(single(), tmp_path / str(share), objective, dtype=torch.float32, changes=changes)
        divergences[share] = [float(found[f"{step}/divergence"]) for step in (0, 39)]
    assert divergences[0.0][1] < 0.5 * divergences[0.0][0]
    assert divergences[0.0][1] < 0.5 * divergences[1.0][1]


def test_maps_heads_and_schedules() -> None:
    assert even_layer_map(2, 6) == (2, 5)
    assert even_layer_map(6, 6) == (0, 1, 2, 3, 4, 5)
    assert even_layer_map(3, 2) == (0, 0, 1)
    assert num_relation_heads(tiny_run.SHAPE, TEACHER) == 8
    part = LossPart(2.0, 0.25, 0.5)
    assert [part.at(progress) for progress in (0.0, 0.25, 0.49, 0.5, 1.0)] == [0.0, 2.0, 2.0, 0.0, 0.0]
    assert LossPart(1.0).at(1.0) == 1.0
    with pytest.raises(ConfigError, match="two shares of the training in order"):
        LossPart(1.0, 0.5, 0.2)
    objective = make(single())
    objective.settings = replace(objective.settings, layer_map=(0, 3))
    with config_error("layer_map", match=r"layer_map: needs a layer of the teacher \(0 to 2, or -1 for none\)"):
        objective.own_modules(tiny_run.SHAPE)
    objective.settings = replace(objective.settings, layer_map=(-1, 2))
    assert list(objective.own_modules(tiny_run.SHAPE)) == ["distillation_1"]
    objective.settings = replace(objective.settings, layer_map=(-1, -1))
    with config_error("layer_map", match="layer_map: maps no layer"):
        objective.own_modules(tiny_run.SHAPE)


def test_a_layer_map_counts_only_where_hidden_states_are_compared() -> None:
    settings = DistillationSettings(parts=DEFAULTS, layer_map=(7,))
    with config_error("layer_map", match="layer_map: needs a layer of the teacher"):
        check_shapes(settings, tiny_run.SHAPE, TEACHER)
    check_shapes(replace(settings, parts=LOGITS_ONLY), tiny_run.SHAPE, TEACHER)


def test_projections_between_equal_widths_start_as_the_identity() -> None:
    objective = make(single())
    (module, _) = objective.own_modules(replace(TEACHER, num_layers=2)).values()
    assert torch.equal(module.weight, torch.eye(48))
    assert F.linear(torch.ones(1, 48), module.weight).equal(torch.ones(1, 48))
