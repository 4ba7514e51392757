"""On-policy distillation: its rows, its loss against a naive one, layouts, kills."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed, start_distributed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.infer.generate import generate
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.objectives import distillation as module
from modelwright.objectives.distillation import (
    SAMPLED,
    Distillation,
    DistillationSettings,
    LossPart,
    OnPolicyConfig,
    OnPolicyDistillation,
    prompts_of_rows,
)
from modelwright.objectives.rollouts import RolloutConfig
from modelwright.objectives.teacher import TeacherModel
from modelwright.ops.distillation_loss import DivergenceKind
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.objective import Objective, forward
from modelwright.train.technique import Technique, Update
from refusals import config_error

pytestmark = pytest.mark.slow

TEACHER = replace(tiny_run.SHAPE, num_layers=3, model_dim=48, num_heads=6, num_kv_heads=3, ffn_dim=96)
STUDENT = replace(tiny_run.SHAPE, init_std=0.1)
NUM_STEPS, TEMPERATURE, STOP = 6, 1.5, 5
LOGITS = {"logits": LossPart(1.0)}
PHASES = {"hidden": LossPart(1.0, 0.0, 0.34), "attention": LossPart(1.0, 0.34, 0.5), "logits": LossPart(1.0, 0.34, 1.0)}
REVERSE = DivergenceKind(name="reverse_kl")


def student(dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(STUDENT)
    model.init_weights(0)
    return model.to(dtype)


def make(
    world: World,
    parts: Any = LOGITS,
    *,
    dtype: torch.dtype = torch.float64,
    share: float = 1.0,
    sharded: bool = False,
    divergence: DivergenceKind = REVERSE,
    num_steps: int = NUM_STEPS,
) -> OnPolicyDistillation:
    model = Decoder(TEACHER)
    model.init_weights(7)
    with torch.no_grad():
        for parameter in model.parameters():  # as sharp as a trained one
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    distillation = Distillation(
        source=tiny_run.Rows(),
        teacher=TeacherModel.of(model.to(dtype), world, sharded=sharded),
        settings=DistillationSettings(
            parts=parts, temperature=TEMPERATURE, label_share=0.4, divergence=divergence, chunk_tokens=50
        ),
        num_steps=num_steps,
    )
    config, rollout = OnPolicyConfig(share=share), RolloutConfig(max_completion_length=9)
    return OnPolicyDistillation(distillation=distillation, config=config, rollout=rollout, stop_ids=(STOP,), seed=3)


def rows(*documents: tuple[list[int], int]) -> TokenBatch:
    """One row of documents, each with the number of tokens at its beginning that are not predicted; then padding."""
    ids, labels, segments = list[int](), list[int](), list[int]()
    for number, (tokens, num_hidden) in enumerate(documents):
        ids += tokens
        labels += [IGNORED if at + 1 < num_hidden else token for at, token in enumerate(tokens[1:])] + [IGNORED]
        segments += [number] * len(tokens)
    padding = 20 - len(ids)
    positions = [at for tokens, _ in documents for at in range(len(tokens))]
    return TokenBatch(
        input_ids_BT=torch.tensor([ids + [0] * padding]),
        labels_BT=torch.tensor([labels + [IGNORED] * padding]),
        positions_BT=torch.tensor([positions + [0] * padding]),
        segments_BT=torch.tensor([segments + [-1] * padding], dtype=torch.int32),
    )


def test_prompts_are_questions_or_beginnings_of_texts() -> None:
    chat, text, silent = ([10, 11, 12, 13, 14, 15], 3), ([20, 21, 22, 23, 24, 25, 26], 0), ([30, 31, 32], 3)
    found = prompts_of_rows(rows(chat, text, silent), 9)
    assert [(one.ids, one.max_tokens) for one in found] == [([10, 11, 12], 3), ([20, 21, 22, 23], 3)]
    found = prompts_of_rows(rows(chat, text, silent), 2)
    assert [(one.ids, one.max_tokens) for one in found] == [([10, 11, 12], 2), ([20, 21, 22, 23, 24], 2)]
    assert prompts_of_rows(rows(silent), 9) == []


def documents_of(batch: TokenBatch) -> list[tuple[list[int], list[int]]]:
    """The tokens of each document of a batch with the one that its last label is, and its labels."""
    found = []
    for row in range(batch.num_rows):
        for number in range(int(batch.segments_BT[row].max()) + 1):
            is_own = batch.segments_BT[row] == number
            ids, labels = batch.input_ids_BT[row, is_own].tolist(), batch.labels_BT[row, is_own].tolist()
            assert batch.positions_BT[row, is_own].tolist() == list(range(len(ids)))
            found.append((ids + labels[-1:], labels))
    return found


def test_rows_are_prompts_with_what_the_student_says() -> None:
    """A student that is sure of each next token says what a greedy loop without a cache would."""
    objective, model, batch = make(single()), student(), tiny_run.Rows().batch(1)
    with torch.no_grad():
        model.norm.weight.mul_(1e4)
    prompts = prompts_of_rows(batch, 9)
    said = objective.completed_rows(batch, model, 1).labels_BT
    objective.stop_ids = (int(said[said != IGNORED].bincount().argmax()),)  # a token that it does say
    found = objective.completed_rows(batch, model, 1)
    assert found.input_ids_BT.shape == batch.input_ids_BT.shape
    assert list(found.extras) == [SAMPLED]
    documents, stopped = documents_of(found), 0
    assert len(prompts) == len(documents) > 8
    for prompt, (ids, labels) in zip(prompts, documents, strict=True):
        expected, is_stopped = list(prompt.ids), False
        while len(expected) < len(prompt.ids) + prompt.max_tokens and not is_stopped:
            hidden = model(torch.tensor([expected]), torch.arange(len(expected))[None], causal_attend())
            expected.append(int(model.logits(hidden)[0, -1].argmax()))
            is_stopped = expected[-1] in objective.stop_ids
        stopped += is_stopped
        assert ids == expected
        assert labels == [IGNORED] * (len(prompt.ids) - 1) + expected[len(prompt.ids) :]
    assert 0 < stopped < len(prompts)
    assert int(found.extras[SAMPLED].sum()) == len(prompts)


def test_rows_without_a_label_are_empty() -> None:
    silent = rows(([30, 31, 32], 3))
    found = make(single()).completed_rows(silent, student(), 1)
    assert found.input_ids_BT.shape == silent.input_ids_BT.shape
    assert found.num_targets == 0
    assert bool((found.segments_BT == -1).all())


def test_each_step_draws_its_own_tokens_and_repeats_them() -> None:
    objective, model, batch = make(single()), student(), tiny_run.Rows().batch(1)
    one, again, other = (objective.completed_rows(batch, model, step).input_ids_BT for step in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def naive_loss(objective: OnPolicyDistillation, model: Decoder, batch: TokenBatch) -> Tensor:
    """The mean divergence of the completions' tokens, document by document, times the squared temperature; labels have
    no part in it."""
    teacher = objective.distillation.teacher.frozen.executor.model
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in documents_of(batch):
        tokens, places = torch.tensor([ids[: len(labels)]]), torch.arange(len(labels))[None]
        with torch.no_grad():
            its = (teacher.logits(teacher(tokens, places, causal_attend()))[0] / TEMPERATURE).softmax(-1)
        own = (model.logits(model(tokens, places, causal_attend()))[0] / TEMPERATURE).softmax(-1)
        for place, label in enumerate(labels):
            if label == IGNORED:
                continue
            p, q = its[place], own[place]
            match objective.distillation.settings.divergence:
                case DivergenceKind(name="forward_kl"):
                    value = (p * (p / q).log()).sum()
                case DivergenceKind(name="reverse_kl"):
                    value = (q * (q / p).log()).sum()
                case DivergenceKind(beta=beta):
                    m = beta * p + (1 - beta) * q
                    value = beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()
            total, count = total + value, count + 1
    return TEMPERATURE**2 * total / count


@pytest.mark.parametrize("kind", [DivergenceKind(), REVERSE, DivergenceKind(name="jsd", beta=0.2)])
def test_loss_and_gradients_equal_naive_ones(kind: DivergenceKind) -> None:
    objective, model = make(single(), divergence=kind), student()
    batch = next(objective.batches(model, first=2, rank=0, world_size=1))
    terms = objective.losses(forward(model, batch), batch, model)
    ours = terms.losses["logits"] / objective.weights(batch)["logits"]
    naive = naive_loss(objective, model, batch)
    torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-12)
    assert float(naive.detach()) > 0.01
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, fast, slow in zip(names, *(torch.autograd.grad(one, parameters) for one in (ours, naive)), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert set(terms.metrics) == set(objective.metric_names)
    value, count = terms.metrics["on_policy/divergence"]
    assert float(value / count) * TEMPERATURE**2 == pytest.approx(float(naive.detach()))
    assert float(terms.metrics["divergence"][1]) == 0
    lengths = [sum(label != IGNORED for label in labels) for _, labels in documents_of(batch)]
    assert [int(one) for one in terms.metrics["completions/mean_length"]] == [sum(lengths), len(lengths)]


def test_a_share_of_the_batches_is_sampled_and_only_where_logits_are_learned() -> None:
    objective = make(single(), share=0.3, num_steps=1000)
    assert 250 < sum(map(objective.is_sampled, range(1000))) < 350
    assert not any(map(make(single(), share=0.0).is_sampled, range(NUM_STEPS)))
    phased = make(single(), PHASES)
    assert [phased.is_sampled(step) for step in range(NUM_STEPS)] == [False] * 3 + [True] * 3
    model = student()
    for name, one in phased.own_modules(model.config).items():
        model.heads[name] = one.to(torch.float64)
    first, second = (next(phased.batches(model, first=step, rank=0, world_size=1)) for step in (0, 5))
    assert torch.equal(first.input_ids_BT, tiny_run.Rows().batch(0).input_ids_BT)
    assert SAMPLED in second.extras


def train(
    world: World,
    folder: Path,
    objective: Objective,
    *,
    parallel: Any = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> dict[str, Tensor]:
    """The final weights by name, and the losses and metrics of each update."""
    torch.set_num_threads(1)
    model, found = student(dtype), {}

    def keep(update: Update) -> None:
        for name, value in {**update.losses, **update.metrics}.items():
            if name != "executed_flops":
                found[f"{update.step}/{name}"] = torch.tensor(value, dtype=torch.float64)

    settings = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 1, "eval_every_steps": 3, **changes}
    tiny_run.run(
        folder,
        tiny_run.settings(**settings),
        model=model,
        objective=objective,
        world=world,
        techniques=[tiny_run.always(Technique(name="keep", on_gradients=keep, needs=frozenset()))],
        parallel=ParallelConfig(**(parallel or {})),
        heldout=[tiny_run.Rows().batch(900)],
    )
    return found | {name: weight.clone() for name, weight in model.state_dict().items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one copy": {},
    "copies": {"parallel": {"shared_memory": False}},
    "zero 3": {"parallel": {"zero_stage": 3}, "parts": PHASES},
    "tensor": {"parallel": {"tensor": 2}},
    "context": {"parallel": {"context": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
}


def run_layout(world: World, folder: Path, name: str) -> dict[str, Tensor]:
    """One of `LAYOUTS`, with batches of both kinds; a single process leaves the layout out."""
    layout = LAYOUTS[name]
    parallel = layout.get("parallel", {}) if world.size > 1 else {}
    objective = make(world, layout.get("parts", LOGITS), share=0.7, sharded="zero_stage" in parallel)
    several = {"gradient_accumulation_steps": 2, "checkpoint_every_steps": 0}
    return train(world, folder / name.replace(" ", "-"), objective, parallel=parallel, **several)


def run_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {name: run_layout(world, folder, name) for name in LAYOUTS}


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    alone = {name: run_layout(single(), tmp_path / "alone", name) for name in ("copies", "zero 3")}
    sampled = [step for step in range(NUM_STEPS) if f"{step}/on_policy/divergence" in alone["copies"]]
    assert 0 < len(sampled) < NUM_STEPS
    for found in run_distributed(run_layouts, 2, tmp_path / "two"):
        for name, values in found.items():
            expected = alone["zero 3" if name == "zero 3" else "copies"]
            assert values.keys() == expected.keys() or name == "pipeline"
            for key, value in values.items():
                torch.testing.assert_close(
                    value, expected[key], rtol=1e-7, atol=1e-9, msg=lambda text, at=f"{name}, {key}": f"{at}: {text}"
                )


def die_while_generating(world: World, folder: Path) -> None:
    """In the fourth step, with a part of its completions."""
    num_calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 4:
            return generate(*args, **options)
        return generate(*args, **options, on_step=lambda finished: finished < 3 or os.kill(os.getpid(), signal.SIGKILL))

    module.generate = counted
    train(world, folder, make(world, dtype=torch.float32), dtype=torch.float32)


def die_in_forward(world: World, folder: Path) -> None:
    objective, num_updates = make(world, dtype=torch.float32), 0
    losses = objective.losses

    def counted(output: Tensor, batch: Any, model: Decoder) -> Any:
        nonlocal num_updates
        num_updates += output.requires_grad
        if num_updates == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(output, batch, model)

    objective.losses = counted
    train(world, folder, objective, dtype=torch.float32)


@pytest.mark.parametrize("killed", [die_while_generating, die_in_forward])
def test_a_killed_run_goes_on_with_the_same_bits(killed: Any, tmp_path: Path) -> None:
    (ended,) = start_distributed(killed, 1, tmp_path / "cut").wait()
    assert ended.code == -signal.SIGKILL
    resumed = train(single(), tmp_path / "cut", make(single(), dtype=torch.float32), dtype=torch.float32)
    whole = train(single(), tmp_path / "whole", make(single(), dtype=torch.float32), dtype=torch.float32)
    assert "0/logits" not in resumed
    assert "3/on_policy/divergence" in resumed
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    with config_error("OnPolicyDistillation"):
        train(single(), tmp_path, make(single()), async_updates={"mode": "hogwild"})


@pytest.mark.slow
def test_a_student_becomes_like_its_teacher_where_it_goes_itself(tmp_path: Path) -> None:
    objective = make(single(), dtype=torch.float32, num_steps=100)
    found = train(
        single(), tmp_path, objective, dtype=torch.float32, num_steps=100, checkpoint_every_steps=0, eval_every_steps=0
    )
    first, last = (float(found[f"{step}/on_policy/divergence"]) for step in (0, 99))
    assert last < 0.5 * first


def test_the_share_is_checked() -> None:
    with config_error("share"):
        OnPolicyConfig(share=1.5)
