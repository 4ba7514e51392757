"""Claim: a kill costs training less time than with Hugging Face `Trainer`, and the weights end with the same bits.

How a training is killed and started again, and what the parts of the lost time are, is in `killed_runs`.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_file

from modelwright.core.config import derive_seed
from modelwright.core.resources import num_usable_cores
from modelwright.data.rows.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.model.hf import save_model
from modelwright.train.config import TrainConfig
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.kill_worker import BATCHES, MODEL, OURS, ROWS, TRAINER, Task
from modelwright_claims.killed_runs import OUTCOMES, PARTS, RIGHT, Run, kill_after, kill_in_save, run_to_its_end
from modelwright_claims.launch import answer_of
from modelwright_claims.statistics import Estimate, differences, estimate, exact
from modelwright_claims.workbench import Size, packed_rows

OVER, BY_DEFAULT = "starting over", f"{TRAINER}, default interval"
TOOLS = {OURS: OURS, TRAINER: TRAINER, OVER: OURS, BY_DEFAULT: TRAINER}
"""The tool of each side."""
WHOLE, KILLED, LOST, SAME = "without a kill", "with a kill", "time lost per kill", "same bits"
IN_SAVE = "killed in a save"
HALF, SAME_IN_SAVE = f"{IN_SAVE}, half-written checkpoint left", f"{IN_SAVE}, same bits"
KEYS = {"input_ids": "input_ids_BT", "position_ids": "positions_BT", "labels": "labels_BT", "shift_labels": "labels_BT"}
"""What Trainer calls the tensors of a batch. Our labels are those of the next token already."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """save_every: steps between checkpoints; num_kills: after a step, of every side; num_in_saves: of either tool."""

    size: Size
    save_every: int
    num_kills: int
    num_in_saves: int
    sides: Sequence[str] = tuple(TOOLS)


FULL = Plan(
    size=Size(model_dim=192, num_layers=2, seq_len=128, batch_rows=2, num_steps=600), save_every=50, num_kills=5,
    num_in_saves=6,
)  # fmt: skip
QUICK = Plan(
    size=Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=2, num_steps=60), save_every=20, num_kills=1,
    num_in_saves=1, sides=(OURS, TRAINER, OVER),
)  # fmt: skip


def draw_kills(plan: Plan) -> list[int]:
    """Return the steps after which training is killed, one from each of equal parts of the training, which begin after
    the first checkpoint. None is one with a checkpoint, because kills in a save have figures of their own.
    """
    dice, first = random.Random(derive_seed(0, "kills")), plan.save_every + 1
    bounds = [first + number * (plan.size.num_steps - first) // plan.num_kills for number in range(plan.num_kills + 1)]
    return [dice.choice([step for step in range(*part) if step % plan.save_every]) for part in pairwise(bounds)]


def prepare(setting: Setting, size: Size, folder: Path) -> Task:
    """Write the initial weights, and the batches of our loader for the tool that does not read our rows."""
    rows = packed_rows(setting, seq_len=size.seq_len, mode="best_fit", split="train")
    (folder / ROWS).symlink_to(rows.folder.absolute())
    model = Decoder(size.model_config(rows.vocab_size))
    model.init_weights(0)
    save_model(model, folder / MODEL, eos_id=rows.eos_id)
    loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=0)
    batches = [loader.batch(step) for step in range(size.num_steps)]
    tensors = {name: torch.cat([getattr(batch, field) for batch in batches]) for name, field in KEYS.items()}
    save_file(tensors, folder / BATCHES)
    return Task(
        folder=str(folder), num_steps=size.num_steps, batch_rows=size.batch_rows, seq_len=size.seq_len,
        threads=num_usable_cores(),
    )  # fmt: skip


def measure(setting: Setting) -> Measurement:
    """For every kill each tool trains once without it and each side once with it; kills in saves come last."""
    plan, started, samples = QUICK if setting.quick else FULL, time.perf_counter(), dict[str, list[float]]()
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    command = [sys.executable, "-m", "modelwright_claims.kill_worker", "defaults"]
    peer = {"version": "not installed", "save_steps": 0} if missing else answer_of(command, TRAINER)
    every = {OURS: plan.save_every, OVER: 0, TRAINER: plan.save_every, BY_DEFAULT: peer["save_steps"]}
    sides = [side for side in plan.sides if TOOLS[side] == OURS or not missing]
    shares = [number / plan.num_in_saves for number in range(plan.num_in_saves)]
    steps, own_default, errors = draw_kills(plan), TrainConfig(), list[str]()

    def add(name: str, side: str, value: float) -> None:
        samples.setdefault(f"{name}, {side}", []).append(float(value))

    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        task = prepare(setting, plan.size, Path(folder))
        short = replace(task, num_steps=3 * plan.save_every)
        # These are not timed, so they also read the programs from the disk for those that are.
        short_wholes = {side: run_to_its_end(side, short) for side in sides if side in TOOLS.values()}
        for step in steps:
            wholes = dict[str, Run]()
            for side in sides:
                tool = TOOLS[side]
                if tool not in wholes:
                    wholes[tool] = run_to_its_end(tool, task)
                    add(WHOLE, tool, wholes[tool].seconds)
                kill = kill_after(step, tool, replace(task, save_every=every[side]), wholes[tool])
                add(KILLED, side, kill.seconds)
                add(SAME, side, kill.is_same)
                for part, value in kill.parts.items():
                    add(part, side, value)
                lost_s = kill.seconds - wholes[tool].seconds
                setting.progress.note(f"{side}, killed after step {step}: {lost_s:.1f} s lost")
        for share in shares:
            for tool, whole in short_wholes.items():
                kill = kill_in_save(share, tool, replace(short, save_every=plan.save_every), whole)
                add(HALF, tool, kill.is_half)
                for outcome in OUTCOMES:
                    add(f"{IN_SAVE}, {outcome}", tool, kill.outcome == outcome)
                if kill.error:
                    errors.append(f"{tool}: {kill.error}")
                setting.progress.note(f"{tool}, {IN_SAVE}: {kill.outcome}")
    return Measurement(
        samples=samples,
        conditions={
            **plan.size.describe(),
            **described(__name__, plan=plan, task=task, peer=peer, own_default=own_default),
            "killed after step": ", ".join(map(str, steps)),
            "killed in a save, after this share of its time": ", ".join(f"{share:.2f}" for share in shares),
            "rivals that are not installed": f"{TRAINER} ({', '.join(missing)})" if missing else "none",
            "errors after a kill in a save": "; ".join(dict.fromkeys(errors)) or "none",
            "seconds": time.perf_counter() - started,
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def lost(side: str) -> list[float]:
        pairs = zip(samples[f"{KILLED}, {side}"], samples[f"{WHOLE}, {TOOLS[side]}"], strict=True)
        return [killed - whole for killed, whole in pairs]

    def same_in_save(tool: str) -> Estimate:
        outcomes = zip(*(samples[f"{IN_SAVE}, {outcome}, {tool}"] for outcome in RIGHT), strict=True)
        return exact(100 * fmean(map(sum, outcomes)))

    for side in TOOLS:
        judgment.note(f"{LOST}, {side}", lambda side=side: estimate(lost(side)), "s", say=f"{side} {{0.mean:.1f}} s")
    judgment.ask(f"{LOST}, {OURS} over {TRAINER}", lambda: differences(lost(OURS), lost(TRAINER)), "s", "<", 0.0)
    for rival in (OVER, BY_DEFAULT):
        judgment.note(f"{LOST}, {OURS} over {rival}", lambda rival=rival: differences(lost(OURS), lost(rival)), "s")
    judgment.ask(f"{SAME}, {OURS}", lambda: exact(100 * fmean(samples[f"{SAME}, {OURS}"])), "%", ">=", 100.0)
    judgment.ask(f"{SAME_IN_SAVE}, {OURS}", lambda: same_in_save(OURS), "%", ">=", 100.0)
    with judgment.part():
        judgment.require(any(samples[f"{HALF}, {OURS}"]), "no kill left a half-written checkpoint")
    for rival in (TRAINER, OVER, BY_DEFAULT):
        judgment.note(f"{SAME}, {rival}", lambda rival=rival: exact(100 * fmean(samples[f"{SAME}, {rival}"])), "%")
    say = f"{{0.mean:.0f}}% of the kills in a save end with the same bits on {TRAINER}"
    judgment.note(f"{SAME_IN_SAVE}, {TRAINER}", lambda: same_in_save(TRAINER), "%", say=say)
    judgment.show(samples, [name for name in samples if name.startswith(IN_SAVE)], "%", 100)
    for part, unit in PARTS.items():
        judgment.show(samples, [f"{part}, {side}" for side in TOOLS], unit)
    return judgment.verdict()


CLAIM = declared(__name__)
