"""distill: the student of the stage before learns from the teacher; then both are compared. Artifact: the student with
its tokenizer in the Hugging Face layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright.core.artifacts import RunDir, read_manifest
from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES, Feature, feature
from modelwright.core.config import ConfigError, constant, derive_seed, digest, dump, prefix_errors
from modelwright.data.clean.folder import read_kept
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.scoring import EvaluateConfig, score_documents, select_documents, summarize_scores
from modelwright.infer.generate import measure_speed
from modelwright.objectives import distillation as distilling
from modelwright.objectives.rollouts import RolloutConfig
from modelwright.objectives.teacher import TeacherCache, TeacherModel
from modelwright.ops.distillation_loss import DivergenceKind, DivergenceName
from modelwright.pipeline.estimate.cost import StageEstimate
from modelwright.pipeline.report.blocks import Fact, Section, Table, count, kind_title, number
from modelwright.pipeline.report.run_data import RunData, StageData
from modelwright.pipeline.stage import Rates, RunConfig, Stage, StageInputs
from modelwright.pipeline.stages import student as students
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.pack import PACK, model_before, tokenizer_stage
from modelwright.pipeline.stages.rows import ALL_ROWS, TEXT_KINDS
from modelwright.pipeline.stages.training import TrainedModel, save_language_model, training_spec
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective

FP32_BYTES = 4
COMPARED_BYTES = 200_000
"""Bytes of held-out text of each kind on which teacher and student are compared."""
SPEED_SHAPES = {"decoding, 8 streams": (8, 1), "prompt of 256 tokens": (1, 256)}
"""Batches on which speed is measured: streams, and tokens of each."""

Window = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Parts of the distillation loss, each with a weight and the shares of the training at which it begins and ends."""

    hidden: Window = (1.0, 0.0, 0.1)
    """Hidden states of mapped layers: mean squared error after a learned projection (TinyBERT)."""
    attention: Window = (1.0, 0.1, 0.2)
    """Attention: relations between queries, keys and values of the last layers (MiniLMv2), for any two models."""
    logits: Window = (1.0, 0.0, 1.0)
    """Logits: `divergence` from the teacher, mixed with the cross-entropy of the labels."""
    temperature: float = 1.0
    """Temperature of both models' logits; the divergence is multiplied by its square. 2.5 is what guides recommend for
    classifiers; next tokens were learned better at 1 (docs/guides/smaller.md)."""
    label_share: float = 0.2
    """Share of the labels in the part `logits`."""
    cache_top_k: int = 0
    """The teacher's likeliest tokens that are stored on disk for each token, so that later epochs need no teacher; 0
    computes all logits anew. The rest of the probability counts as one more outcome."""
    layer_map: tuple[int, ...] = constant(())
    """Layer of the teacher, from 0, with which each layer of the student is compared, from its first; -1 for none:
    [2, 5] or [-1, 5]. Empty maps evenly, the last to the last."""
    divergence: DivergenceName = "forward_kl"
    """Divergence of the logits: `forward_kl` KL(teacher || student), `reverse_kl` KL(student || teacher), or `jsd`, a
    generalized Jensen-Shannon divergence between the two (GKD, Agarwal et al. 2024)."""
    jsd_beta: float = constant(0.5)
    """Share of the teacher in the mixture that both models are compared with, between 0 and 1: small values act like
    `forward_kl`, large ones like `reverse_kl`."""
    on_policy: distilling.OnPolicyConfig = field(default_factory=distilling.OnPolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.parts()
        if not any(part.weight > 0 and part.end == 1.0 for part in parts.values()):
            raise ConfigError("logits: no part of the loss lasts until the end; let one of them end at 1")
        if self.temperature <= 0:
            raise ConfigError(f"temperature: must be above 0, got {self.temperature}; 1 is usual")
        if not 0 <= self.label_share <= 1:
            raise ConfigError(f"label_share: must be in [0, 1], got {self.label_share}")
        if self.cache_top_k < 0:
            raise ConfigError(f"cache_top_k: must be 0 (no cache) or more, got {self.cache_top_k}")
        if not 0 < self.jsd_beta < 1:
            raise ConfigError(
                f"jsd_beta: must be between 0 and 1, got {self.jsd_beta}; the ends are divergence forward_kl and "
                "reverse_kl"
            )
        if self.cache_top_k and self.divergence != "forward_kl":
            raise ConfigError(
                f"cache_top_k: stored probabilities give the divergence forward_kl alone, not {self.divergence}; set "
                "it to 0"
            )
        if self.cache_top_k and self.on_policy.share:
            raise ConfigError(
                "cache_top_k: completions of the student are new in every step, so nothing stored is read again; set "
                "it or on_policy.share to 0"
            )
        if self.on_policy.share and not parts["logits"].weight:
            raise ConfigError("on_policy.share: is the share of the part logits, whose weight is 0; give it a weight")

    def features(self) -> list[Feature]:
        """Returns the properties of a run that the parts of the loss need, for a check before anything is read."""
        parts = [
            feature(name, needs=distilling.PART_NEEDS[name]) for name, part in self.parts().items() if part.weight > 0
        ]
        if self.on_policy.share:
            parts.append(feature("on_policy.share", needs=[EQUAL_REPLICAS, SYNCHRONOUS_UPDATES]))
        return [*super().features(), *parts]

    def parts(self) -> dict[distilling.PartName, distilling.LossPart]:
        """Returns the parts of the loss by name. Raises `ConfigError` that names the part."""
        windows: dict[distilling.PartName, Window] = {
            "hidden": self.hidden,
            "attention": self.attention,
            "logits": self.logits,
        }
        result: dict[distilling.PartName, distilling.LossPart] = {}
        for name, window in windows.items():
            try:
                result[name] = distilling.LossPart(*window)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return result

    def settings(self) -> distilling.DistillationSettings:
        """Returns the settings of the objective."""
        return distilling.DistillationSettings(
            parts=self.parts(),
            temperature=self.temperature,
            label_share=self.label_share,
            divergence=DivergenceKind(name=self.divergence, beta=self.jsd_beta),
            layer_map=self.layer_map,
        )

    def identity(self) -> dict[str, Any]:
        """Settings for the digest, without those with the value from before they existed."""
        always = {
            "divergence": "forward_kl",
            "on_policy": dump(distilling.OnPolicyConfig()),
        }
        result = super().identity()
        without = {name for name, value in always.items() if result[name] == value}
        without |= {"jsd_beta"} if self.divergence != "jsd" else set()
        without |= {"rollout"} if not self.on_policy.share else set()
        return {name: value for name, value in result.items() if name not in without}


def _objective(inputs: StageInputs) -> Objective:
    config = inputs.config
    training: DistillConfig = inputs.training
    # A run whose student is divided over ranks has no memory for a whole teacher on each.
    sharded = config.parallel.zero_stage == 3 and inputs.world.size > 1
    teacher = TeacherModel.of(students.load_teacher(config, inputs.parents), inputs.world, sharded=sharded)
    cache = None
    if training.cache_top_k:
        if sharded:
            raise ConfigError(
                "distill.cache_top_k: rows that are not stored yet need the whole teacher on every process, which "
                "parallel.zero_stage 3 divides; choose a lower stage or no cache"
            )
        if training.cache_top_k > teacher.config.vocab_size:
            raise ConfigError(
                f"distill.cache_top_k: {training.cache_top_k} is more than the vocabulary ({teacher.config.vocab_size})"
            )
        identity: Any = students.teacher_settings(config)
        if not identity:
            identity = read_manifest(inputs.parents[model_before(config, students.STUDENT.name)]).content_digest
        # One folder for each teacher, temperature and number of tokens: stored probabilities of others would be wrong.
        name = digest({"teacher": identity, "temperature": training.temperature, "top_k": training.cache_top_k})
        cache = TeacherCache(
            teacher=teacher,
            folder=inputs.folder / "teacher" / name[:16],
            temperature=training.temperature,
            top_k=training.cache_top_k,
            rank=inputs.world.rank,
        )
    distillation = distilling.Distillation(
        source=inputs.loader,
        teacher=teacher,
        settings=training.settings(),
        num_steps=training.resolve_num_steps(inputs.loader.num_batches_per_epoch),
        cache=cache,
    )
    if not training.on_policy.share:
        return distillation
    return distilling.OnPolicyDistillation(
        distillation=distillation,
        config=training.on_policy,
        rollout=training.rollout,
        stop_ids=Tokenizer.load(inputs.parents[tokenizer_stage(config)]).stop_ids,
        seed=derive_seed(config.seed, DISTILL.name, "on policy"),
    )


def _build(config: RunConfig, run: RunDir, present: Sequence[str]) -> Stage:
    """Adds the teacher and the held-out documents to the training. Raises `ConfigError` for settings that do not fit
    the shapes of teacher and student.
    """
    training: DistillConfig = config.section(DISTILL)
    shapes = (
        students.student_shape(config),
        students.teacher_shape(config),
    )  # errors about them name the section student
    with prefix_errors(DISTILL.name):
        distilling.check_shapes(training.settings(), *shapes)
    stage = _TRAINING.build(config, run, present)
    return replace(
        stage,
        settings={**stage.settings, "teacher": students.teacher_settings(config)},
        parents=tuple(dict.fromkeys((*stage.parents, CLEAN.name, *students.teacher_parents(config)))),
    )


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    """Writes the student, and compares parameters, bits per byte and speed of teacher and student, each a pair."""
    save_language_model(trained)
    context, config = trained.context, trained.config
    device = context.ranks.world.device
    tokenizer = Tokenizer.load(context.parents[tokenizer_stage(config)])
    models = [students.load_teacher(config, context.parents), trained.model]
    documents = list(read_kept(context.parents[CLEAN.name], split="heldout"))
    kinds = TEXT_KINDS if any(document.kind in TEXT_KINDS for document in documents) else ("qa",)
    documents = select_documents(documents, kinds=kinds, max_bytes_per_kind=COMPARED_BYTES, seed=0)
    bits: list[dict[str, dict[str, Any]]] = []
    for model in models:
        scores = score_documents(model.to(device), tokenizer, documents, EvaluateConfig(), progress=context.progress)
        bits.append(summarize_scores(scores, resamples=1, seed=0))
    teacher, student = (model.cpu() for model in models)  # speed is that of the engine on a CPU
    pairs = measure_speed(teacher, student, list(SPEED_SHAPES.values()))
    comparison = {
        "parameters": [model.config.num_parameters for model in models],
        "bits_per_byte": {kind: [one[kind]["bits_per_byte"] for one in bits] for kind in bits[0]},
        "tokens_per_s": {
            name: [pair.reference_tokens_per_s, pair.int8_tokens_per_s]
            for name, pair in zip(SPEED_SHAPES, pairs, strict=True)
        },
    }
    return {"comparison": comparison}


def _report(data: RunData, stage: StageData) -> Section:
    section = _TRAINING.report(data, stage)
    assert section is not None
    if "comparison" not in stage.facts:
        return section

    def row(title: str, pair: Sequence[float], cells: Iterable[str]) -> list[str]:
        return [title, *cells, f"{pair[1] / pair[0]:.2f}x" if pair[0] else "-"]

    comparison = stage.facts["comparison"]
    rows = [row("parameters", comparison["parameters"], map(count, comparison["parameters"]))]
    for kind, pair in comparison["bits_per_byte"].items():
        rows.append(row(f"bits per byte, {kind_title(kind)}", pair, (number(one, 4) for one in pair)))
    for name, pair in comparison["tokens_per_s"].items():
        rows.append(row(f"tokens per second, {name}", pair, map(count, pair)))
    header = ["measure", "teacher", "student", "student / teacher"]
    table = Table(header, rows, "The student beside its teacher", numeric=range(1, 4))
    return replace(section, blocks=[table, *section.blocks])


def _facts(data: RunData, stage: StageData) -> Sequence[Fact]:
    if "comparison" not in stage.facts:
        return []
    comparison = stage.facts["comparison"]
    share = comparison["parameters"][1] / comparison["parameters"][0]
    speed = next(iter(comparison["tokens_per_s"].values()))
    return [Fact("Student", f"{share:.0%} of the parameters", f"decodes {speed[1] / speed[0]:.1f}x as fast")]


def _estimate(config: RunConfig, run: RunDir, rates: Rates) -> StageEstimate:
    # To the student's training come forward passes, each a third of a training step: one of the teacher for each row,
    # and one of the student for each row that it generates.
    student = _TRAINING.estimate(replace(config, model=students.student_shape(config)), run, rates)
    teacher = _TRAINING.estimate(config, run, rates)
    training: DistillConfig = config.section(DISTILL)
    sampled = training.on_policy.share * (training.logits[2] - training.logits[1])
    student_s, teacher_s = (one.seconds - one.overhead_s for one in (student, teacher))
    return replace(
        student,
        flops=student.flops * (1 + sampled / 3) + teacher.flops / 3,
        seconds=student.overhead_s + student_s * (1 + sampled / 3) + teacher_s / 3,
        peak_bytes=student.peak_bytes + FP32_BYTES * config.model.num_parameters,
    )


_TRAINING = training_spec(
    name="distill",
    title="Distilling the teacher into the student",
    report_title="Distillation",
    model_title="student",
    objective=_objective,
    rows=ALL_ROWS,
    run_needs=frozenset(),  # those of the parts that settings choose, see `DistillConfig.features`
    needs=lambda config: (PACK.name, students.STUDENT.name, CLEAN.name),
    config=DistillConfig,
    only_if_named=True,
    start=lambda config, name: students.STUDENT.name,
    save=_save,
    headline=_facts,
)
DISTILL = replace(_TRAINING, build=_build, estimate=_estimate, report=_report, reads=(students.STUDENT,))
