"""student: the model from which distillation starts: a smaller one with random weights, a part of the teacher, or the
run's own model if the teacher comes from a folder. Artifact: a model folder with the run's tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from modelwright.compress.prune import check_part, even_layers, input_moments, prune, pruned_config
from modelwright.core.artifacts import RunDir, verify_if_artifact
from modelwright.core.config import ConfigError, constant, derive_seed, dump, prefix_errors
from modelwright.data.rows.loader import PackedRows
from modelwright.data.tokenizer.tokenizer import Tokenizer, tokenizer_difference
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import load_config, load_model
from modelwright.pipeline.stage import RunConfig, Stage, StageContext, StageSpec
from modelwright.pipeline.stages.estimates import fixed_estimate
from modelwright.pipeline.stages.init import folder_fingerprint, save_model_folder
from modelwright.pipeline.stages.pack import PACK, model_before, needed_start, tokenizer_stage
from modelwright.pipeline.stages.rows import ALL_ROWS, TEXT_ROWS

DIMENSIONS = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "ffn_dim", "head_dim")


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """The teacher of a distillation, and the student before it."""

    teacher: str = ""
    """Folder of the teacher in the Hugging Face layout, of any supported type, with the run's tokenizer; "" is the
    run's model at that point."""
    init: Literal["scratch", "prune", "continue"] = "prune"
    """`prune` takes evenly spaced layers and the most important heads and channels of the teacher; `scratch` draws
    random weights; `continue` takes the run's model, with another one as `teacher`."""
    num_layers: int = 0
    """Blocks of the student; 0 is the teacher's number, here and below."""
    model_dim: int = 0
    """Width of the residual stream; pruning keeps the teacher's."""
    num_heads: int = 0
    """Query heads."""
    num_kv_heads: int = 0
    """Key/value heads."""
    ffn_dim: int = 0
    """Width of the feed-forward layer."""
    head_dim: int = 0
    """Width of one head; pruning keeps the teacher's."""
    calibration_rows: int = constant(64)
    """Training rows on which the activations are measured by which pruning ranks heads and channels."""

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 is the teacher's")
        if self.init == "continue" and not self.teacher:
            raise ConfigError("teacher: init continue trains the run's model, so it needs a folder of another one")
        if self.init == "continue" and any(getattr(self, name) for name in DIMENSIONS):
            raise ConfigError("init: continue keeps the shape of the run's model; choose prune or scratch for another")

    def shape(self, teacher: ModelConfig) -> ModelConfig:
        """Returns the student's configuration. Raises `ConfigError` for a shape that `init` cannot make."""
        given = {name: getattr(self, name) for name in DIMENSIONS if getattr(self, name)}
        if given.get("num_layers", 0) > teacher.num_layers:
            raise ConfigError(
                f"num_layers: {self.num_layers} is more than the teacher's {teacher.num_layers}; a student has fewer"
            )
        layers = even_layers(teacher, given.get("num_layers", teacher.num_layers))
        smaller = replace(pruned_config(teacher, replace(teacher, num_layers=len(layers)), layers), **given)
        if self.init == "prune":
            check_part(smaller, teacher)
        if smaller == teacher:
            raise ConfigError(
                "num_layers: the student has the teacher's shape; set num_layers, num_heads, num_kv_heads or ffn_dim"
            )
        return smaller


def teacher_shape(config: RunConfig) -> ModelConfig:
    """Returns the teacher's configuration, known before the run."""
    settings: StudentConfig = config.section(STUDENT)
    return load_config(Path(settings.teacher)) if settings.teacher else config.model


def student_shape(config: RunConfig) -> ModelConfig:
    """Returns the student's configuration, known before the run. Raises `ConfigError` as `StudentConfig.shape`."""
    settings: StudentConfig = config.section(STUDENT)
    if settings.init == "continue":
        return config.model
    with prefix_errors(STUDENT.name):
        return settings.shape(teacher_shape(config))


def teacher_parents(config: RunConfig) -> tuple[str, ...]:
    """Returns the stages whose models are needed as the teacher or the student."""
    settings: StudentConfig = config.section(STUDENT)
    if settings.teacher and settings.init != "continue":
        return ()
    return needed_start(config, STUDENT.name)


def teacher_settings(config: RunConfig) -> list[list[str | int]]:
    """Returns the fingerprint of a teacher from a folder; [] for one of the run, which is a parent."""
    settings: StudentConfig = config.section(STUDENT)
    return folder_fingerprint(Path(settings.teacher), f"{STUDENT.name}.teacher") if settings.teacher else []


def load_teacher(config: RunConfig, parents: Mapping[str, Path]) -> Decoder:
    """Loads the teacher. parents: artifacts by stage name. Raises `ConfigError` if its tokens are not the run's."""
    settings: StudentConfig = config.section(STUDENT)
    if tokenizer_stage(config) not in parents:
        raise ConfigError(
            "stages: the learning rate of a distillation can be searched in a run whose first training is another one, "
            "because teacher and student are made by the run; set it by hand"
        )
    if not settings.teacher:
        return load_model(parents[model_before(config, STUDENT.name)])
    folder = Path(settings.teacher)
    verify_if_artifact(folder)
    difference = tokenizer_difference(Tokenizer.load(folder), Tokenizer.load(parents[tokenizer_stage(config)]))
    if difference:
        raise ConfigError(
            f"{STUDENT.name}.teacher: {folder} has another tokenizer than the run ({difference}), so its predictions "
            "are about other tokens; choose a teacher with the run's tokenizer, or start the run from it with init_from"
        )
    # The student may have a longer context than the teacher, which has to read the same rows.
    row_len = config.section(PACK).seq_len
    if (longest := load_config(folder).max_seq_len) < row_len:
        raise ConfigError(
            f"{STUDENT.name}.teacher: the context of {folder} ({longest}) is shorter than a row (pack.seq_len "
            f"{row_len}); lower pack.seq_len"
        )
    return load_model(folder)


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    parents = dict.fromkeys((PACK.name, tokenizer_stage(config), *teacher_parents(config)))

    def make_student(context: StageContext) -> None:
        settings: StudentConfig = config.section(STUDENT)
        context.progress.begin(STUDENT.name, 0, "tensors")
        teacher = load_teacher(config, context.parents)
        if settings.init == "continue":
            student = load_model(context.parents[model_before(config, STUDENT.name)])
            if student.config.vocab_size != teacher.config.vocab_size:
                raise ConfigError(
                    f"{STUDENT.name}.teacher: predicts {teacher.config.vocab_size} tokens, and the run's model "
                    f"{student.config.vocab_size}; choose a teacher with as many"
                )
        else:
            with prefix_errors(STUDENT.name):
                shape = settings.shape(teacher.config)
            if settings.init == "scratch":
                student = Decoder(shape)
                student.init_weights(derive_seed(config.seed, STUDENT.name))
            else:
                folders = [context.parents[PACK.name] / rows.name / "train" for rows in (ALL_ROWS, TEXT_ROWS)]
                packed = PackedRows(next(folder for folder in folders if folder.is_dir()))
                rows = islice(packed.batches(1), settings.calibration_rows)
                student = prune(teacher, shape, input_moments(teacher, rows))
        save_model_folder(student, Tokenizer.load(context.parents[tokenizer_stage(config)]), context.output.path)
        sizes = {"teacher_parameters": teacher.config.num_parameters, "num_parameters": student.config.num_parameters}
        context.output.facts |= sizes
        context.progress.end()
        share = sizes["num_parameters"] / sizes["teacher_parameters"]
        context.progress.note(f"student: {sizes['num_parameters']:,} parameters, {share:.0%} of the teacher's")

    return Stage(
        name=STUDENT.name,
        title=STUDENT.title,
        settings={
            "student": dump(config.section(STUDENT), constants=True),
            "teacher": teacher_settings(config),
            "seed": derive_seed(config.seed, STUDENT.name),
        },
        parents=tuple(parents),
        run=make_student,
    )


STUDENT = StageSpec(
    name="student",
    title="Making the student",
    config=StudentConfig,
    needs=lambda config: (PACK.name, *teacher_parents(config)),
    only_if_named=True,
    build=_build,
    estimate=lambda config, run, rates: fixed_estimate("student", seconds=5.0),
)
