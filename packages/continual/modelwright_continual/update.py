"""An incremental update: a run of the pipeline that continues a model's training on new texts and a replay of old ones.

The learning rate rises and decays again (Ibrahim et al. 2024, Simple and scalable strategies to continually pre-train
large language models, https://arxiv.org/abs/2403.08763); the paper also found 5% of replay sufficient for a weak shift.
The run is an ordinary one, so it resumes to the same bits after `kill -9`, and `modelwright run` and `modelwright
report` work on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, merge, parse
from modelwright.core.progress import Progress
from modelwright.data.sources.sources import SourceConfig
from modelwright.model.hf import load_config
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run import execute, previous_config
from modelwright.pipeline.run_config import parse_run
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.average import AVERAGE
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.evaluate import EVALUATE
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.pretrain import PRETRAIN
from modelwright.pipeline.stages.quantize import QUANTIZE
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.sft import SFT
from modelwright.recipes.load import fitted_lengths
from modelwright.train.config import LENGTHS
from modelwright_continual.ancestry import ancestry_of
from modelwright_continual.benchmark import Benchmark
from modelwright_continual.caps import Caps
from modelwright_continual.old_texts import unknown_texts
from modelwright_continual.update_data import DataRequest, Form, UpdateData, prepare_data
from modelwright_continual.update_files import NEW, OLD, data_folder

TRAININGS: Mapping[Form, str] = {"text": PRETRAIN.name, "conversations": SFT.name}
"""The stage that trains on each form of text."""
# Defaults for texts: tokens of a row, limited by the model's maximum, and rows of a batch.
TEXT_ROW_LEN, TEXT_BATCH_ROWS = 1024, 8
_SCHEDULE = {"kind": "warmup_cosine", "warmup_fraction": 0.05, "final_lr_fraction": 0.1}
_CLEAN_CONVERSATIONS: Mapping[str, Any] = {
    "quality": {"limits": {"qa.max_duplicate_line_fraction": 1.0}},
    "duplicates": {"contained": "heldout", "near": False, "pairs_by": "conversation"},
}
"""Settings that keep common answers of many questions, such as labels, and conversations with one long prompt and
different questions, which are near-duplicates. Texts are cleaned as in any run."""
_TRAINING: Mapping[Form, Mapping[str, Any]] = {
    "text": {"num_epochs": 1.0, "learning_rate": 1e-4, "schedule": _SCHEDULE},
    "conversations": {"num_epochs": 2.0, "learning_rate": 2e-5, "weight_decay": 0.01, "schedule": _SCHEDULE},
}
LORA: Mapping[str, Any] = {"lora": {"r": 16}, "learning_rate": 2e-4}


class CarryOut(Protocol):
    """Carries out a run, or resumes it, and raises the same errors as `pipeline.run.execute`. words: the command line,
    for run.json.
    """

    def __call__(
        self, config: RunConfig, run: RunDir, *, origin: str, words: Sequence[str], progress: Progress
    ) -> object: ...


def in_this_process(config: RunConfig, run: RunDir, *, origin: str, words: Sequence[str], progress: Progress) -> None:
    """Carries out a run in this process; the default `CarryOut`."""
    execute(config, run, only=(), origin=origin, words=words, progress=progress)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Inputs of an update.

    model: run or model folder from which training continues; new: sources of new texts; old: sources of old texts
    besides those of the model's runs; replay: share of old rows among all; self_replay: replay texts that the model
    generates; average: average the resulting weights with the model's; lora: train low-rank adapters, which are merged
    at the end; num_processes: number of processes among which the rows of a batch of conversations can be divided;
    caps: on the new texts of one source, user or template; settings: of the run, overriding those of an update.
    """

    model: Path
    new: tuple[str, ...]
    old: tuple[str, ...] = ()
    replay: float = 0.05
    self_replay: bool = False
    average: bool = True
    lora: bool = False
    num_processes: int = 1
    caps: Caps = field(default_factory=Caps)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def data(self) -> DataRequest:
        """Inputs of `prepare_data`. Raises `ConfigError` if a replay is requested of old texts that are not known."""
        ancestry = ancestry_of(self.model)
        config = parse(SourceConfig, self.settings.get("data", {}), "data")
        seed = _whole_number(self.settings, "seed", RunConfig.seed)
        return DataRequest(
            new=self.new,
            old=self.old,
            old_runs=ancestry.runs,
            unknown=unknown_texts(ancestry),
            own_model=find_model(self.model).source.folder if self.self_replay else None,
            replay=self.replay,
            seed=seed,
            caps=self.caps,
            data=config,
        )


def run_update(
    request: UpdateRequest,
    benchmark: Benchmark,
    run: RunDir,
    *,
    words: Sequence[str],
    progress: Progress,
    carry_out: CarryOut = in_this_process,
) -> None:
    """Carries out the update in `run`, or resumes it. words: the command line, for run.json.

    Raises `ConfigError`, `DataError` and the errors of `carry_out`.
    """
    run.create()
    data = prepare_data(request.data, benchmark, data_folder(run), progress)
    config = update_config(request, data, benchmark, run)
    carry_out(config, run, origin=f"update of {request.model}", words=words, progress=progress)


def update_config(request: UpdateRequest, data: UpdateData, benchmark: Benchmark, run: RunDir) -> RunConfig:
    """Returns the configuration of the run: cleaning with decontamination, packing by source, training on the mixture,
    averaging, quantization, the report.
    """
    found = find_model(request.model)
    folder = found.source.folder.resolve()
    trainings = [TRAININGS[form] for form in data.forms]
    names = [CLEAN.name, PACK.name, *(name for name in (PRETRAIN.name, SFT.name) if name in trainings)]
    names += [AVERAGE.name] if request.average else []
    settings: dict[str, Any] = {
        "name": run.path.resolve().name,
        "init_from": str(folder),
        "stages": [*names, QUANTIZE.name, REPORT.name],
        "data": {"sources": list(data.sources)} | ({"own_answers": "train"} if request.self_replay else {}),
        CLEAN.name: _cleaning(data),
        **{TRAININGS[form]: _training(form, request) for form in data.forms},
        "ewc": {"source": OLD},
        EVALUATE.name: {"domains": [], "multiple_choice": {"num_questions": 0}},
    }
    if request.average:
        files = {task: [str(benchmark.file(task, "validation").resolve())] for task in (OLD, NEW)}
        settings[AVERAGE.name] = files
    settings = _laid_over(settings, request.settings)
    lengths = _kept_lengths(run, data) or _lengths(folder, data, settings, request.num_processes)
    # Settings of the user win over fitted lengths.
    return parse_run(merge(lengths, settings))


def _laid_over(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the user's settings over the update's. A user's length replaces all lengths of the update; of the
    section `data` only `validation_fraction` is used, because the texts were read when they were prepared.
    """
    base = dict(settings)
    for name in TRAININGS.values():
        if name in base and any(_group(given, name).get(length) for length in LENGTHS):
            base[name] = {key: value for key, value in base[name].items() if key not in LENGTHS}
    of_data = {key: value for key, value in given.get("data", {}).items() if key == "validation_fraction"}
    return merge(base, {**given, "data": of_data})


def _group(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the settings of a section. Raises `ConfigError` if it is a single value."""
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}: is a group of settings, got {section!r}; name one, such as --{name}.KEY VALUE")
    return cast(Mapping[str, Any], section)


def _whole_number(section: Mapping[str, Any], name: str, default: int) -> int:
    """Reads a number that is needed before the run's configuration exists. Raises `ConfigError` for any other value."""
    value = section.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: must be a whole number, got {value!r}")
    return value


def _cleaning(data: UpdateData) -> dict[str, Any]:
    """Returns the settings of the cleaning. The step `noise` stays off: its classifier would be trained on old texts as
    clean ones, and new texts differ from them.
    """
    of_forms = _CLEAN_CONVERSATIONS if "conversations" in data.forms else {}
    return {**of_forms, "decontamination": {"sources": [data.heldout]}}


def _training(form: Form, request: UpdateRequest) -> Mapping[str, Any]:
    """Returns the settings of a training. The mixture gives each batch the exact share of replayed rows; fractions of a
    row are carried over to the next batch.
    """
    shares = {NEW: 1.0 - request.replay, OLD: request.replay}
    mixture = {"batching": {"mixture": {"weights": shares}}} if request.replay else {}
    return merge(merge(_TRAINING[form], mixture), LORA if request.lora else {})


def _kept_lengths(run: RunDir, data: UpdateData) -> dict[str, Any]:
    """Returns the lengths that the run was created with, whatever the number of processes that resume it; {} for a new
    run.
    """
    previous = previous_config(run)
    trainings = [spec for spec in (PRETRAIN, SFT) if spec.name in [TRAININGS[form] for form in data.forms]]
    if previous is None or not all(previous.has(spec) for spec in (PACK, *trainings)):
        return {}
    kept: dict[str, Any] = {spec.name: {"batch_tokens": previous.section(spec).batch_tokens} for spec in trainings}
    return {
        "validation_tokens": previous.validation_tokens,
        PACK.name: {"seq_len": previous.section(PACK).seq_len},
        **kept,
    }


def _lengths(folder: Path, data: UpdateData, settings: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    """Returns the lengths of rows and batches, fitted to the conversations if there are any."""
    most = load_config(folder).max_seq_len
    if "conversations" in data.forms:
        sources = SourceConfig(sources=data.sources, own_answers=settings["data"].get("own_answers", "refuse"))
        lengths = fitted_lengths(
            folder, sources, settings, max_seq_len=most, num_microbatches=1, num_processes=num_processes
        )
        row_len = int(lengths[PACK.name]["seq_len"])
    else:
        row_len = _whole_number(_group(settings, PACK.name), "seq_len", min(TEXT_ROW_LEN, most))
        lengths = {PACK.name: {"seq_len": row_len}}
    text = {PRETRAIN.name: {"batch_tokens": TEXT_BATCH_ROWS * row_len}} if "text" in data.forms else {}
    return merge(lengths, text)


def quantized_folder(run: RunDir) -> Path:
    """Returns the folder of the quantized model, which is judged and served."""
    return run.stage(QUANTIZE.name).artifact
