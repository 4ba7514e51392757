"""Shared parts of the stages grpo and ppo: rows of prompts with the reference answers of their records, rewards, the
reference model, the evaluation before the first update, samples, and the section of the report.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import DataError, derive_seed
from modelwright.core.records import column, json_line, read_records
from modelwright.data.document import Split
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.examples import PromptRecord, read_prompts, write_prompts
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import TokenSequence
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.objectives.experience import ReferenceModel, RolloutObjective
from modelwright.objectives.preference import MODEL, MODEL_REWARDS, model_terms, with_folder, without_folder
from modelwright.objectives.rollouts import HeldoutRewards, RolloutConfig, RolloutWorker, heldout_batch
from modelwright.pipeline.report.blocks import Block, Chart, Fact, Samples, Section, Table, TextSample, number
from modelwright.pipeline.report.charts import Line, line_chart, smooth
from modelwright.pipeline.report.results import training_section
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import RowSet, RunConfig, StageInputs, StageSpec
from modelwright.pipeline.stages.dpo import reference_model
from modelwright.pipeline.stages.pack import PACK, needed_start, reward_model_before, tokenizer_stage
from modelwright.pipeline.stages.reward import REWARD
from modelwright.pipeline.stages.rows import PackJob, RowUse
from modelwright.pipeline.stages.training import FurtherModels, metric_charts, training_spec
from modelwright.reward.build import WeightedSum, build_reward
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective, evaluate_heldout
from modelwright.train.technique import Runtime, Technique, TechniqueBuilder


def _pack_prompts(job: PackJob, split: Split) -> None:
    prompts, name = list[PromptRecord](), f"{PROMPT_ROWS.name}/{split}"
    num_long = 0
    for document in job.documents(split, "qa"):
        try:
            prompt = PromptRecord.of(document, job.tokenizer)
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        fits = len(prompt.ids) < job.settings.seq_len
        num_long += not fits
        if fits:
            prompts.append(prompt)
    if not prompts:
        if split == "train":
            raise DataError(
                f"pack: found no prompt to generate completions of ({num_long} are longer than a row); give records "
                "with a question and its reference answer, in one of the forms of docs/data.md, or raise pack.seq_len"
            )
        return
    if num_long:
        job.context.progress.note(
            f"pack: {num_long:,} of {num_long + len(prompts):,} prompts of {split} are longer than a row (pack.seq_len "
            f"{job.settings.seq_len}) and are left out of {PROMPT_ROWS.name}"
        )
    # One prompt per row: row numbers are the keys under which `write_prompts` stores the records. The end token stands
    # for the answer and is the only target.
    one_per_row = replace(job.settings, mode="one_per_row", group_by="none", score="")
    sequences = (TokenSequence([*one.ids, job.tokenizer.end_id], [0] * len(one.ids) + [1]) for one in prompts)
    replace(job, settings=one_per_row).pack(name, sequences)
    job.context.output.facts[name]["num_long_prompts"] = num_long
    write_prompts(job.context.output.path / name, prompts)


def heldout_prompts(folder: Path, config: RunConfig, *, batch_rows: int) -> Sequence[TokenBatch]:
    """Returns the held-out prompts on which training is evaluated, always the same ones: so many rows that they contain
    about `config.validation_tokens`. A single batch, whatever `batch_rows` is: all ranks work on it together.
    """
    if not folder.is_dir():
        return ()
    packed = PackedRows(folder)
    numbers = np.arange(packed.num_rows)
    requested = max(1, config.validation_tokens // packed.seq_len) if config.validation_tokens else packed.num_rows
    if requested < packed.num_rows:
        numbers = PackedLoader(packed, batch_rows=1, seed=derive_seed(config.seed, "heldout")).order(0, requested)
    return [heldout_batch(packed.gather(numbers[:1]), numbers.tolist())]


PROMPT_ROWS = RowSet(name="prompts", title="prompts", pack=_pack_prompts, learned="completions", stdlib_bytes=4e6)


DEFAULT_REWARD = "exact_match"
"""The reward of a run that names none and trains no reward model: the comparison with the reference answer."""
FIRST_EVALUATION, COMPLETIONS = "first-evaluation.json", "completions.jsonl"
Batches = Sequence[TokenBatch]


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """Constructor arguments that the objectives of both stages share."""

    worker: RolloutWorker
    heldout: HeldoutRewards
    reference: ReferenceModel
    num_completions: int
    row_len: int
    observe: Callable[[int, Sequence[Mapping[str, Any]]], None]


def reward_terms(config: RunConfig, name: str) -> Mapping[str, Any]:
    """Returns the terms of the reward of the stage `name`: those of its settings; without any, the reward model that
    the run has trained before; without that, the comparison with the reference answer.
    """
    terms = config.section(name).rewards
    return terms or {MODEL if reward_model_before(config, name) else DEFAULT_REWARD: {}}


def needed_reward_model(config: RunConfig, name: str) -> tuple[str, ...]:
    """Returns the earlier stage that trains the reward model, if a term of the reward uses the run's own model."""
    if not without_folder(reward_terms(config, name)):
        return ()
    return (reward_model_before(config, name) or REWARD.name,)


def build_terms(inputs: StageInputs, name: str) -> WeightedSum:
    """Returns the reward of the stage `name`. Raises `ConfigError` for wrong terms."""
    terms, trained = reward_terms(inputs.config, name), reward_model_before(inputs.config, name)
    if not inputs.config.section(name).rewards:
        scorer = f"the reward model of the stage {trained}" if trained else DEFAULT_REWARD
        inputs.note(f"{name}: answers are scored by {scorer}, because {name}.rewards is empty")
    if trained and not model_terms(terms):
        inputs.note(
            f"{name}: the reward model of the stage {trained} scores nothing here, because {name}.rewards has no term "
            f"of the kind {MODEL}"
        )
    if own := needed_reward_model(inputs.config, name):
        terms = with_folder(terms, inputs.parents[own[0]])
    return build_reward(terms, kinds=MODEL_REWARDS, path=f"{name}.rewards", log=inputs.note)


def rollout_parts(inputs: StageInputs, name: str, rollout: RolloutConfig) -> RolloutParts:
    """Returns the parts of the objective of the stage `name`. Raises `ConfigError` for wrong rewards, and `DataError`
    if no prompt leaves room for a completion.
    """
    config, row_len = inputs.config, inputs.config.section(PACK).seq_len
    folder = inputs.parents[PACK.name] / PROMPT_ROWS.name
    worker = RolloutWorker(
        prompts=fitting(read_prompts(folder / "train"), row_len, rollout, name, inputs.note),
        tokenizer=Tokenizer.load(inputs.parents[tokenizer_stage(config)]),
        reward=build_terms(inputs, name),
        config=rollout,
        seed=derive_seed(config.seed, name, "rollouts"),
    )
    # Without held-out documents the folder is missing, and nothing is evaluated
    heldout = read_prompts(folder / "heldout") if (folder / "heldout").is_dir() else ()
    return RolloutParts(
        worker=worker,
        heldout=HeldoutRewards(worker=replace(worker, prompts=heldout)),
        reference=ReferenceModel(load=partial(reference_model, inputs, name, ""), row_len=row_len),
        num_completions=inputs.training.batch_rows(row_len),
        row_len=row_len,
        observe=partial(keep_completions, inputs.folder / COMPLETIONS),
    )


def fitting(
    prompts: Sequence[PromptRecord], row_len: int, rollout: RolloutConfig, name: str, note: Callable[[str], None]
) -> Sequence[PromptRecord]:
    """Returns the prompts that leave room for a completion in a row. Raises `DataError` if none does."""
    longest = row_len - rollout.max_completion_length
    kept = [one for one in prompts if len(one.ids) <= longest]
    remedy = f"raise pack.seq_len ({row_len}) or lower rollout.max_completion_length"
    if not kept:
        raise DataError(
            f"{name}: none of {len(prompts)} prompts leaves room for {rollout.max_completion_length} tokens in a row; "
            f"{remedy}"
        )
    if len(kept) < len(prompts):
        note(f"{name}: {len(prompts) - len(kept)} of {len(prompts)} prompts are too long and are left out; {remedy}")
    return kept


def keep_completions(path: Path, rollout: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """Rewrites the file with the samples of the first rollout and of the newest one."""
    # A resumed run may repeat the first rollout, whose samples then replace those in the file.
    first = [one for one in read_records(path) if one["rollout"] == 0 and rollout > 0]
    write_atomic(path, "".join(map(json_line, [*first, *({"rollout": rollout, **one} for one in samples)])))


def evaluates_first(objective: Objective, heldout: Batches, folder: Path) -> list[TechniqueBuilder]:
    """Returns a technique that evaluates the policy before the first update and writes the metrics to a file of the
    stage's folder: the report shows the gain over them. The training loop itself evaluates only after updates.
    """

    def build(run: Runtime) -> Technique | None:
        def on_batch(step: int, batch: TokenBatch) -> TokenBatch:
            if step == 0:
                # Collective: every rank evaluates its part before the first one writes.
                with run.formats.evaluating():
                    evaluation = evaluate_heldout(run.executor, objective, heldout, run.global_mesh, alive=run.alive)
                if run.world.is_first:
                    write_atomic(folder / FIRST_EVALUATION, json.dumps(dict(evaluation.metrics)))
            return batch

        return Technique(name="first_evaluation", on_batch=on_batch, needs=frozenset()) if heldout else None

    return [build]


def rollout_training(
    *,
    name: str,
    title: str,
    report_title: str,
    model_title: str,
    objective: Callable[[StageInputs], Objective],
    config: type[TrainConfig],
    updates_per_row: Callable[[Any], float],
    further: Callable[[RunConfig, Any], FurtherModels],
    charts: Mapping[str, Mapping[str, str]],
    kl_metric: str,
    needs: Callable[[RunConfig], tuple[str, ...]] = lambda run: (),
) -> StageSpec:
    """Returns a stage that learns from rollouts of the prompts. updates_per_row: completions in the updates for each
    prompt. further: computation without gradients for each of these completions, their generation included. charts:
    see `metric_charts`. kl_metric: metric that is the distance from the start. needs: further stages on which it
    depends.
    """
    spec = training_spec(
        name=name,
        title=title,
        report_title=report_title,
        model_title=model_title,
        objective=objective,
        rows=PROMPT_ROWS,
        run_needs=RolloutObjective.needs,
        needs=lambda run: (PACK.name, *needed_start(run, name), *needed_reward_model(run, name), *needs(run)),
        config=config,
        only_if_named=True,
        row_use=RowUse(
            heldout=heldout_prompts, updates_per_row=updates_per_row, learns_by_heart=False, techniques=evaluates_first
        ),
        headline=reward_fact,
        further=further,
    )
    return replace(spec, report=lambda data, stage: rollout_section(data, stage, report_title, charts, kl_metric))


def reward_fact(data: RunData, stage: StageData) -> Sequence[Fact]:
    """Returns the held-out reward before and after training."""
    before, after = _first_evaluation(stage).get("reward"), stage.facts.get("heldout_metrics", {}).get("reward")
    if before is None or after is None:
        return []
    title = data.model_titles[stage.name]
    return [Fact(f"Held-out reward, {title}", number(after, 3), f"{number(before, 3)} before, {decoding(data, stage)}")]


def rollout_section(
    data: RunData, stage: StageData, title: str, charts: Mapping[str, Mapping[str, str]], kl_metric: str
) -> Section:
    """Returns rewards and samples before and after, curves, and the blocks of every training except for its loss."""
    section = training_section(stage, data.config.section(stage.name), title, loss_unit="")
    records = stage.records()
    matches = (re.fullmatch(r"rewards/(.+)/mean", key) for record in records for key in record)
    names = list(dict.fromkeys(match[1] for match in matches if match))  # terms of the reward
    means = {f"Reward term {name}": {f"rewards/{name}/mean": "rollouts"} for name in names if len(names) > 1}
    wins = {f"rewards/{name}/win_rate": f"by {name}" for name in names}  # against completions before the first update
    terms = {**means, "Share of completions that beat those of the start": wins}
    first, last = _first_evaluation(stage), stage.facts.get("heldout_metrics", {})
    blocks: list[Block] = []
    if rows := [[name, number(first[name], 3), number(last[name], 3)] for name in first if name in last]:
        caption = f"Each held-out prompt once, {decoding(data, stage)}."
        blocks.append(Table(["metric", "before", "after"], rows, "Held-out prompts", caption, numeric=(1, 2)))
    completions = read_records(stage.folder.path / COMPLETIONS)
    newest = max((one["rollout"] for one in completions), default=0)
    for rollout, which in {0: "first", newest: "last"}.items():
        if items := [
            TextSample(one["prompt"], one["completion"], f"reward {number(float(one['reward']), 3)}")
            for one in completions
            if one["rollout"] == rollout
        ]:
            blocks.append(Samples(items, f"Completions of the {which} rollout"))
    blocks += metric_charts(stage, {"Reward": {"reward": "rollouts"}, **terms, **charts})
    # The score of a reward model keeps rising where the quality that it should measure falls (Gao et al. 2023, "Scaling
    # laws for reward model overoptimization", figure 1): each term of several against the distance from the start.
    for place, name in enumerate(names if len(names) > 1 else ()):
        metric = f"rewards/{name}/mean"
        both = [one for one in records if kl_metric in one and metric in one]
        curves = (smooth(column(both, one)) for one in (kl_metric, metric))
        if points := [(kl, reward) for (_, kl), (_, reward) in zip(*curves, strict=True)]:
            svg = line_chart(
                [Line("rollouts", points)], name=f"{stage.name}-kl-{place}", x_label="KL, nats", y_label=name
            )
            blocks.append(Chart(f"Reward term {name} against the KL from the start", svg))
    return replace(section, blocks=[*blocks, *section.blocks[1:]])  # without the chart of the loss


def _first_evaluation(stage: StageData) -> Mapping[str, float]:
    try:
        return json.loads((stage.folder.path / FIRST_EVALUATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def decoding(data: RunData, stage: StageData) -> str:
    """Returns in words how held-out prompts were answered."""
    greedy = data.config.section(stage.name).rollout.heldout_decoding == "greedy"
    return "greedy completions" if greedy else "sampled completions"
