"""Builds the configuration of a run from a recipe, a YAML file or a run directory that the user names; for `modelwright
finetune`, from a model and data, with lengths of rows and batches that fit the records. The lengths are settings of the
run like any others: config.yaml keeps them, and a resumed run takes them from there.

Reads settings from the environment, too, under the names that a published toolkit gave them.
They override a recipe or file and are overridden by the command line, in the section `training` and in each stage that
has its own precision, and are part of the resolved configuration like any other setting.

    DEEPSEEK_PRECISION_MODE      a policy, or fp16, bf16 and mixed for fp16_mixed, bf16_mixed and bf16_mixed
    DEEPSEEK_AMP_ENABLED         0: FP32 in all layers in any case; 1: the mode, or, without one, bf16_mixed in
                                 place of fp32 and of auto
    DEEPSEEK_LOSS_SCALE_WINDOW   updates without overflow after which the loss scale grows
    DEEPSEEK_FP32_OPS            operators that stay in FP32, separated by commas (softmax,layernorm,loss)
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, DataError, hub_hint, load_yaml, merge, nearest
from modelwright.core.hub import model_folder
from modelwright.data.rows.examples import ConversationFit, template_variables
from modelwright.data.sources.forms import FORMS
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.estimate.time_budget import with_lengths_of
from modelwright.pipeline.models import find_model
from modelwright.pipeline.resolve import is_same_run
from modelwright.pipeline.run_config import (
    has_length,
    lay_over,
    left_out,
    parse_layers,
    parse_run,
    previous_config,
    select_stages,
    training_names,
)
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import ROW_LEN_STEP
from modelwright.pipeline.stages.sft import SFT
from modelwright.train.precision.policy import ALWAYS_FP32, KINDS, Policy

MODE, ENABLED = "DEEPSEEK_PRECISION_MODE", "DEEPSEEK_AMP_ENABLED"
WINDOW, OPS = "DEEPSEEK_LOSS_SCALE_WINDOW", "DEEPSEEK_FP32_OPS"
NAMES = (MODE, ENABLED, WINDOW, OPS)

_OTHER_NAMES = {"fp16": "fp16_mixed", "bf16": "bf16_mixed", "mixed": "bf16_mixed"}
_OTHER_OPS = {"layernorm": "norm", "layer_norm": "norm", "rmsnorm": "norm", "cross_entropy": "loss", "sum": "reduction"}
_ANSWERS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def given_names(environment: Mapping[str, str]) -> list[str]:
    """Names of the variables that are set and not empty."""
    return [name for name in NAMES if environment.get(name, "").strip()]


def environment_overrides(environment: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns overrides from the variables, to merge over the configuration `base`. Raises `ConfigError` with the name
    of a wrong variable.
    """
    given = {name: environment[name].strip() for name in given_names(environment)}
    sections = ["training", *(stage for stage in training_names() if _section(_section(base, stage), "precision"))]
    overrides = {name: _precision(given, _section(base, name)) for name in sections}
    return {name: {"precision": precision} for name, precision in overrides.items() if precision}


def _precision(given: Mapping[str, str], training: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of `training.precision`, or of a stage's precision."""
    precision: dict[str, Any] = {}
    mode = given.get(MODE, "").lower()
    mode = _OTHER_NAMES.get(mode, mode)
    if mode and mode not in get_args(Policy):
        raise ConfigError(f"{MODE}: {given[MODE]!r} is not one of {', '.join((*_OTHER_NAMES, *get_args(Policy)))}")
    answer = given.get(ENABLED, "1").lower()
    if answer not in _ANSWERS:
        raise ConfigError(f"{ENABLED}: must be 0 or 1, got {given[ENABLED]!r}")
    is_off = not _ANSWERS[answer]
    # Without a mode, switching mixed precision on changes only policies that do not name a mixed one.
    if ENABLED in given and not mode and _section(training, "precision").get("policy", "auto") in ("fp32", "auto"):
        mode = "bf16_mixed"
    if mode or is_off:
        precision["policy"] = "fp32" if is_off else mode
    if is_off:
        precision |= {"overrides": dict.fromkeys(KINDS, ""), "adaptive": {"kind": "none", "schedule": []}}
    if WINDOW in given:
        text = given[WINDOW]
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{WINDOW}: must be a number of updates, 1 or more, got {text!r}; 1000 or 2000 is usual")
        precision["loss_scale"] = {"growth_interval": int(text)}
    if OPS in given:
        # The operators that always stay in FP32 are among them; the policy reports wrong names.
        named = [name.strip().lower() for name in given[OPS].split(",") if name.strip()]
        precision["fp32_ops"] = list(dict.fromkeys([*ALWAYS_FP32, *(_OTHER_OPS.get(name, name) for name in named)]))
    return precision


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of settings; empty if it is missing or not a mapping, which parsing will reject."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


RECIPES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
"""The YAML file of each recipe."""
RUNS = Path("runs")


@dataclass(frozen=True)
class Request:
    """A run to start: its configuration and folder. origin: source of the configuration, as text; notes: remarks about
    the request for the user.
    """

    config: RunConfig
    run: RunDir
    origin: str
    notes: Sequence[str] = ()


def load(target: str, overrides: Mapping[str, Any], run_dir: str = "", only: Sequence[str] = ()) -> Request:
    """Loads the configuration that `target` names, with `overrides` merged over it. `target`: a recipe's name, a YAML
    file (which may contain `recipe: NAME` and set only differences from it), or a run directory, whose own
    configuration is used; environment variables take precedence over it. `run_dir`: "" for the run's own folder, or
    `runs/<name>`; `only`: the stages named by `--stages`, see `select_stages`. Raises `ConfigError` if the target does
    not exist or a setting is wrong.
    """
    base, own, folder, origin = _base(target)
    environment = environment_overrides(os.environ, base)
    # A folder that the target names keeps the run there; otherwise the name of the run, which an override may set.
    run = RunDir(Path(run_dir) if run_dir else folder or RUNS / str({**base, **overrides}.get("name", "")))
    run.check()
    previous = previous_config(run) if only else None
    selected = {"stages": select_stages(only, previous.stage_names if previous else ())} if only else {}
    config, data = parse_layers(base, environment, {**overrides, **selected})
    if only or folder:
        config = replace(config, further_sections={name: data[name] for name in left_out(data, config)})
    notes = []
    if config.minutes and (ignored := [one.name for one in config.trainings if has_length(overrides.get(one.name))]):
        notes.append(f"{', '.join(ignored)}: minutes ({config.minutes:g}) decides the length, not the one given")
    if not only and (unused := left_out({**own, **overrides}, config)):
        notes.append(f"{', '.join(unused)}: ignored, because the run has no such stage")
    if folder and (added := [name for name in config.sections if name not in data]):
        notes.append(
            f"{', '.join(added)}: takes the default settings, because {folder} had no such stage; name the recipe or "
            "file with --run-dir instead to take its settings"
        )
    if base.get("minutes") and "minutes" not in data:
        # A length has replaced the time budget: trainings without one keep the length that the run was created with,
        # or another length of one training would train the others anew.
        before = previous_config(run)
        if before is not None:
            kept = with_lengths_of(config, before)
            names = [stage.name for stage in config.trainings if not has_length(overrides.get(stage.name))]
            if is_same_run(config, before):
                config = config.with_sections({name: kept.section(name) for name in names})
    return Request(config, run, ", ".join([origin, *given_names(os.environ)]), notes)


def recipe(name: str) -> RunConfig:
    """Configuration of a recipe; `name` is one of `RECIPES`."""
    return parse_run(load_yaml(RECIPES[name]))


def find_run(word: str) -> RunDir:
    """Finds the run directory that the user means: its path, or its name under `runs/`. Raises `ConfigError` if neither
    exists.
    """
    for path in (Path(word), RUNS / word):
        if os.path.isfile(path / "run.json"):
            return RunDir(path)
    if not any(os.path.isdir(path) for path in (Path(word), RUNS / word)):
        raise ConfigError(f"{word}: no such folder, here or as {RUNS / word}{hub_hint(word)}")
    raise ConfigError(f"{word}: is not a run directory (no run.json in it or in {RUNS / word}){hub_hint(word)}")


def find_target(word: str) -> Path:
    """Finds a run directory, a model folder, a run by its name under runs/, or else a model on a hub (OWNER/NAME),
    which is downloaded. Raises `ConfigError` if none exists.
    """
    if hub_hint(word) and not any(os.path.exists(path) for path in (word, RUNS / word)):
        return model_folder(word)
    return Path(word) if (Path(word) / "config.json").is_file() else find_run(word).path


def settings_of_target(target: str) -> dict[str, Any]:
    """Returns the settings of a recipe, a YAML file or a run directory. Raises `ConfigError` if it does not exist."""
    return _base(target)[0]


def _base(target: str) -> tuple[dict[str, Any], Mapping[str, Any], Path | None, str]:
    """Returns a target's settings, those of them that the user wrote, its run folder and its description."""
    path = Path(target)
    if target in RECIPES:
        return load_yaml(RECIPES[target]), {}, None, f"recipe {target}"
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.yaml"):
            raise ConfigError(f"{target}: is a folder without config.yaml, so it is not a run directory")
        return load_yaml(path / "config.yaml"), {}, path, str(path)
    if path.suffix in (".yaml", ".yml"):
        written = load_yaml(path)
        name = written.get("recipe", "")
        data = {"name": path.stem} | {key: value for key, value in written.items() if key != "recipe"}
        if name and (not isinstance(name, str) or name not in RECIPES):
            raise ConfigError(f"{path}: recipe: {name!r} is not one of {', '.join(RECIPES)}")
        return lay_over(load_yaml(RECIPES[name]), data) if name else data, written, None, str(path)
    near = nearest(target, RECIPES)
    hint = f"; did you mean the recipe {near!r}?" if near else f" (recipes: {', '.join(RECIPES)})"
    raise ConfigError(f"{target}: is neither a recipe, nor a .yaml file, nor a run directory{hub_hint(target) or hint}")


RECIPE = "finetune"
LORA: Mapping[str, Any] = {SFT.name: {"lora": {"r": 16}, "learning_rate": 2e-4}}
"""Settings of `--lora`: the rank of PEFT's examples, with the rate of QLoRA (Dettmers et al. 2023, table 9)."""


def finetune_request(
    model: str,
    sources: Sequence[str],
    overrides: Mapping[str, Any],
    run_dir: str = "",
    *,
    lora: bool = False,
    num_processes: int = 1,
    only: Sequence[str] = (),
) -> Request:
    """Builds the request to fine-tune `model`, a Hugging Face folder or a run, on `sources`. lora: train low-rank
    adapters, which are merged into the model at the end; only: the stages named by `--stages`, as in `load`. A run that
    exists keeps the lengths that it was created with. Raises `ConfigError` and `DataError` as `load` does, and if the
    sources hold nothing to fine-tune on.
    """
    if not sources:
        raise ConfigError("finetune: name the files with the examples after the model: modelwright finetune MODEL DATA")
    found = find_model(find_target(model))
    # smollm-support for a model folder smollm and a file support.jsonl.zst
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(sources[0]).name.partition(".")[0] or "data")
    names = {"name": f"{found.source.name}-{stem}"}
    start = {"init_from": str(found.source.folder.resolve()), "data": {"sources": list(sources)}}
    settings = merge(merge(merge(names, start), LORA if lora else {}), overrides)
    # Loaded twice: the first time for the run's folder, its data and its model, from which the lengths follow.
    request, report = load(RECIPE, settings, run_dir), SourceReport()
    previous = previous_config(request.run)
    if previous is not None and previous.has(SFT):
        lengths: Mapping[str, Any] = {
            "validation_tokens": previous.validation_tokens,
            PACK.name: {"seq_len": previous.section(PACK).seq_len},
            SFT.name: {"batch_tokens": previous.section(SFT).batch_tokens},
        }
    else:
        lengths = fitted_lengths(
            found.source.folder,
            request.config.data,
            settings,
            max_seq_len=request.config.model.max_seq_len,
            num_microbatches=request.config.section(SFT).gradient_accumulation_steps,
            num_processes=num_processes,
            report=report,
        )
    request = load(RECIPE, merge(lengths, settings), run_dir, only)
    notes = [f"data: {line}" for line in [report.all_fields.line()] if line]
    return replace(request, origin=f"{request.origin}, model {model}", notes=[*request.notes, *notes])


MOST_MEASURED = 5_000
"""Most records that are measured; of more, equally many of each file."""
EXAMPLES_PER_UPDATE = 16
"""Conversations of one update: between the 8 of TRL's default and the 32 that InstructGPT's fine-tuning took."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRecords:
    """The conversations of some sources, as a tokenizer and its chat template render them."""

    num_conversations: int
    mean_tokens: float
    row_len: int
    """Tokens that 99% of the conversations fit into."""


def measure_records(
    sources: SourceConfig, tokenizer: Tokenizer, *, max_seq_len: int, report: SourceReport | None = None
) -> MeasuredRecords:
    """Measure the conversations of the sources, whose fields `report` counts. Raises `DataError` if the sources hold
    none, or if the chat template refuses one.
    """
    fit, num_tokens = ConversationFit(seq_len=max_seq_len, overlong="split"), 0
    for document in read_documents(
        sources, report=report if report is not None else SourceReport(), sample=MOST_MEASURED
    ):
        if document.kind != "qa" or document.is_undesirable:
            continue
        if not document.has_answer:
            raise DataError(
                f"{document.id}: is a prompt without an answer, so it cannot be learned; name the field of its answer "
                "with --data.fields '{completion: FIELD}', or train with a reward (stages grpo and ppo)"
            )
        try:
            chats = tokenizer.chat.encode_training_chats(
                document.messages, tools=document.tools, variables=template_variables(document)
            )
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        for ids, mask in chats:
            fit.fit(ids, mask, stop_ids=tokenizer.stop_ids)
            num_tokens += len(ids)
    if not fit.num_conversations:
        raise DataError(
            f"{', '.join(sources.sources)}: no record is a question with its answer or a conversation, so there is "
            f"nothing to fine-tune on; accepted are {FORMS}"
        )
    return MeasuredRecords(
        num_conversations=fit.num_conversations, mean_tokens=num_tokens / fit.num_conversations, row_len=fit.row_len()
    )


def fitted_lengths(
    folder: Path,
    sources: SourceConfig,
    given: Mapping[str, Any],
    *,
    max_seq_len: int,
    num_microbatches: int,
    num_processes: int,
    report: SourceReport | None = None,
) -> dict[str, Any]:
    """Computes the row length and the batch that fit the records, as sections of a run, except for settings in `given`.
    folder: with the tokenizer; num_microbatches: of one update. A row is as long as 99% of the conversations need, a
    batch holds about `EXAMPLES_PER_UPDATE` of them in whole rows for every microbatch and process. The sample for
    validation during training is no larger than the held-out part, so that a time budget counts real tokens only.
    """
    own = {stage.name: given.get(stage.name, {}) for stage in (PACK, SFT)}
    measured = measure_records(sources, Tokenizer.load(folder), max_seq_len=max_seq_len, report=report)
    # Rounded up to the step in which rows are cut, within the model's context.
    row_len = min(-(-measured.row_len // ROW_LEN_STEP) * ROW_LEN_STEP, max_seq_len)
    row_len = int(own[PACK.name].get("seq_len", row_len))
    parts = num_microbatches * num_processes
    per_part = max(1, round(EXAMPLES_PER_UPDATE * measured.mean_tokens / (row_len * parts)))
    heldout = sources.validation_fraction * measured.num_conversations * measured.mean_tokens
    sections: dict[str, Any] = {
        PACK.name: {"seq_len": row_len, **own[PACK.name]},
        SFT.name: {"batch_tokens": per_part * parts * row_len, **own[SFT.name]},
    }
    # Only if all records were measured: the mean of a sample says too little about the number of held-out tokens.
    if measured.num_conversations < MOST_MEASURED:
        sections["validation_tokens"] = max(row_len, min(RunConfig.validation_tokens, math.ceil(heldout)))
    return sections
