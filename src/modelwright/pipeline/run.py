"""A run from its configuration to its outcome: checks before any data is prepared, folder, lock, run.json,
config.yaml, stages, signals. The only module that connects all of them; stages and the terminal are elsewhere.

Packed rows of a run for commands that train outside of it: the run's own rows, or newly packed ones.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.core import VERSION
from modelwright.core.artifacts import ArtifactError, Manifest, RunDir, StorageError, save_yaml
from modelwright.core.compatibility import Feature
from modelwright.core.config import STOPPING, ConfigError, ModelwrightError, prefix_errors, require
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.resources import OtherProcesses, busy_machine, git_commit, hardware, versions
from modelwright.core.texts import redact_words
from modelwright.ops.tensor_heap import use_tensor_heap
from modelwright.parallel.context_parallel import check_context, local_spans
from modelwright.parallel.elastic import fit, num_restarts, num_used
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.stages import check_microbatches, check_ties, layers_of_stages
from modelwright.parallel.tensor_parallel import check_shape, stage_tokens
from modelwright.pipeline import process_group
from modelwright.pipeline.augmenting import is_augmented
from modelwright.pipeline.estimate.time_budget import fit_to_minutes, with_lengths_of
from modelwright.pipeline.report.page import closing_lines
from modelwright.pipeline.resolve import (
    check_device,
    check_size,
    resolve,
    resolve_inputs,
    resolved_device,
)
from modelwright.pipeline.run_config import previous_config, read_run_config
from modelwright.pipeline.runner import Outcome, now, run_stages, survey
from modelwright.pipeline.stage import RunConfig, Stage, StageSpec
from modelwright.pipeline.stages.init import INIT
from modelwright.pipeline.stages.pack import PACK, model_before, tokenizer_stage
from modelwright.pipeline.stages.report import REPORT
from modelwright.pipeline.stages.specs import build_stages
from modelwright.train.config import TrainConfig, check_layout
from modelwright.train.memory.offload import check_tier
from modelwright.train.monitors.energy import known_country
from modelwright.train.techniques.augmentation_strength import NEEDS as AUGMENTATION_NEEDS


def check_training(
    config: RunConfig, layout: ParallelConfig, *, num_processes: int, stages: Sequence[str], elastic: bool = False
) -> None:
    """Checks that the extras that `stages` (names) need are installed, and that `num_processes` laid out as `layout`
    can do the trainings among them. `config.model` is the model that is trained; elastic: the layout is fitted to the
    processes first. Raises `ConfigError`.
    """
    to_do = [stage for stage in config.stages if stage.name in stages]
    require({setting: extra for stage in to_do for setting, extra in stage.extras(config).items()})
    trainings = [stage for stage in config.trainings if stage.name in stages]
    on_cpu = resolved_device(config.hardware.device) == "cpu"
    augmented = [stage for stage in trainings if is_augmented(config, stage)]
    from_scratch = [stage for stage in trainings if not model_before(config, stage.name)]
    if trainings:
        check_size(config.model)
    if elastic:
        num_rows = process_group.shared_rows(config)
        with prefix_errors("parallel"):
            layout = fit(layout, num_processes=num_processes, num_rows=num_rows)
        num_processes = num_used(layout)
    if not trainings:
        return
    model, row_len = config.model, config.section(PACK).seq_len
    with prefix_errors("parallel"):
        axes = layout.axes(num_processes)
    try:
        check_shape(model, layout.tensor)
    except ConfigError as error:
        raise ConfigError(f"parallel.tensor: {layout.tensor} does not fit the model (model.{error})") from None
    with prefix_errors("parallel"):
        if layout.pipeline > 1:
            layers_of_stages(model, layout)
            check_ties(model, layout)
        if layout.context > 1:
            local_spans(row_len, layout.context, 0)
            check_context(model, layout.context, layout.context_attention)
        stage_tokens(row_len // layout.context, layout.tensor, sequence_parallel=layout.sequence_parallel)
    for stage in trainings:
        training: TrainConfig = config.section(stage)
        further = [Feature(key=stage.name, needs=stage.run_needs)]
        if stage in augmented:
            further.append(Feature(key="augmentation.methods", needs=frozenset(AUGMENTATION_NEEDS)))
        check_layout(training, layout, num_processes=math.prod(axes.values()), further=further, section=stage.name)
        with prefix_errors(stage.name):
            _check_stage(stage, training, layout, row_len=row_len, axes=axes, on_cpu=on_cpu)
            if stage in from_scratch and training.batch_selection.max_initial_loss:
                raise ConfigError(
                    "batch_selection.max_initial_loss: the initial weights of a run from scratch have the loss "
                    "of a random guess everywhere; start from a trained model with init_from, or leave it at 0"
                )


def _check_stage(
    stage: StageSpec,
    training: TrainConfig,
    layout: ParallelConfig,
    *,
    row_len: int,
    axes: Mapping[str, int],
    on_cpu: bool,
) -> None:
    learns_tokens = type(training) is TrainConfig and stage.rows is not None and stage.rows.learned == "tokens"
    if training.objective and not learns_tokens:
        raise ConfigError(
            f"objective: {', '.join(training.objective)} would replace the objective of {stage.name}, which has its "
            "own settings and rows; name it in a stage that learns the next token, such as pretrain or sft"
        )
    num_copies = training.num_copies(axes)
    num_groups = training.batch_rows(row_len * stage.trained_rows, num_copies=num_copies) // num_copies
    if training.batch_selection.signal != "none":
        training.batch_selection.num_chosen(num_groups, training.gradient_accumulation_steps)
    if training.precision.fp32_matmul == "onednn" and not on_cpu:
        raise ConfigError("precision.fp32_matmul: onednn needs a CPU, and this run uses a GPU; choose default or tf32")
    if training.optimizer_cpu_offload and on_cpu:
        raise ConfigError("optimizer_cpu_offload: needs a GPU, and this run uses the CPU; disable it")
    if training.optimizer_cpu_offload and training.async_updates.mode == "hogwild":
        raise ConfigError(
            "optimizer_cpu_offload: async_updates.mode hogwild shares the optimizer states; disable one of them"
        )
    with prefix_errors("activation_checkpointing"):
        check_tier(training.activation_checkpointing, on_cpu=on_cpu)
    if training.energy.country:
        known_country(training.energy.country, "energy.country")
    zero_bubble = layout.pipeline > 1 and layout.schedule == "zero_bubble"
    kept = training.activation_checkpointing
    if zero_bubble and (training.compile is True or kept.offload != "none" or kept.mode in ("full", "selective")):
        name = "compile" if training.compile is True else "activation_checkpointing"
        raise ConfigError(
            f"{name}: is incompatible with parallel.schedule zero_bubble, which splits blocks; disable it, or use "
            "1f1b or interleaved"
        )
    check_microbatches(layout, training.gradient_accumulation_steps)


PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "openai", "transformers")
LOCK_PATIENCE_S = 120.0


@dataclass(frozen=True)
class RunResult:
    """Result of a run: the outcome of each stage; `is_first`: True on the process that may print.

    model: folder of the last finished model, in the Hugging Face layout; None without one
    report: page about these stages; None if the stage `report` is not one of them
    lines: figures of the finished stages, for the terminal
    """

    outcomes: Sequence[Outcome]
    is_first: bool
    model: Path | None = None
    report: Path | None = None
    lines: Sequence[str] = ()


def execute(
    config: RunConfig,
    run: RunDir,
    *,
    only: Sequence[str],
    origin: str,
    words: Sequence[str],
    progress: Progress,
    elastic: bool = False,
    restart: bool = False,
) -> RunResult:
    """Executes the run in the folder `run` and returns its result.

    `only`: stages to run (empty: all), which must be stages of the configuration; `words`: command line, for run.json;
    `elastic`: the layout is fitted to the processes that exist; `restart`: training whose checkpoints are all damaged
    starts over, and another run in the same folder is replaced. Called by every process that was started. Raises
    `ModelwrightError` for anything that a person can fix, `Stopped` if training was asked to stop.
    """
    run.create()
    num_rows = process_group.shared_rows(config) if elastic else 0
    joined = process_group.join_ranks(config, links=run.path / "links.json", num_rows=num_rows)
    with joined as ranks, ExitStack() as held:
        if ranks is None:
            return RunResult([], False)
        shown = progress if ranks.rank == 0 else SilentProgress()
        if config.minutes and config.trainings:
            config = fit_to_minutes(config, run, ranks, shown)
        if ranks.rank == 0:
            _hold(run, held, LOCK_PATIENCE_S if elastic else 0.0)
            config = resolve(config, previous_config(run), shown, None if restart else run)
            # With the layout of the processes that exist now; config.yaml keeps the requested one.
            stages = build_stages(replace(config, parallel=ranks.layout), run, only)
            to_do = _to_do(run, stages, only)
            # Checked first: a run that is refused must not replace the configuration in the folder.
            check_training(config, ranks.layout, num_processes=ranks.size, stages=to_do)
            save_yaml(run.config, config)
            if places := ranks.placement:
                before, after = (f"{1e3 * time_s:.3g} ms" for time_s in (places.seconds_before, places.seconds_after))
                order = ", ".join(map(str, places.order))
                shown.note(
                    f"placement: messages of a step take {after} instead of {before} by the links; order {order}"
                    if places.seconds_after < places.seconds_before
                    else f"placement: the ranks stay where they are; messages of a step take {before} by the links"
                )
        ranks.barrier()  # config.yaml exists from here on; the others read the first rank's choices from it
        if ranks.rank != 0:
            config = read_run_config(run.config)
            stages = build_stages(replace(config, parallel=ranks.layout), run, only)
        use_tensor_heap()  # in every stage: tensors that outlive a stage then leave no gaps in the heap of the next
        num_threads = process_group.use_threads(config.hardware.num_threads)
        kernels = held.enter_context(process_group.kernels_of_run(run, ranks.world, shown))
        if ranks.rank == 0 and (busy := busy_machine(OtherProcesses(), num_threads)):
            shown.note(busy)
        implied = [stage.name for stage in config.stages if stage.is_implied]
        with _journal(run, config, origin, words, ranks, kernels) as after_stage:
            outcomes = run_stages(
                run,
                stages,
                ranks=ranks,
                progress=shown,
                only=(*implied, *only) if only else (),
                restart=restart,
                after_stage=after_stage,
            )
        models = [run.stage(name).artifact for name in config.served_names if run.stage(name).artifact.is_dir()]
        has_report = any(outcome.stage == REPORT.name for outcome in outcomes)
        return RunResult(
            outcomes,
            ranks.rank == 0,
            model=models[-1] if models else None,
            report=run.report if has_report else None,
            lines=closing_lines(config, run) if ranks.rank == 0 else (),
        )


def check_request(
    config: RunConfig,
    run: RunDir,
    only: Sequence[str],
    *,
    num_processes: int,
    elastic: bool = False,
    restart: bool = False,
) -> None:
    """Raises `ConfigError` for everything that `execute` would reject before its first stage, without starting or
    writing anything.
    """
    previous = previous_config(run)
    if previous is None:
        config = resolve_inputs(config)
        check_device(resolved_device(config.hardware.device))
        to_do: Sequence[str] = config.stage_names
    else:
        config = resolve(config, previous, SilentProgress(), None if restart else run)
        stages = build_stages(config, run, only)
        to_do = _to_do(run, stages, only)
    check_training(config, config.parallel, num_processes=num_processes, stages=to_do, elastic=elastic)


def is_finished(config: RunConfig, run: RunDir, only: Sequence[str]) -> bool:
    """Returns True if nothing of the request remains to be done."""
    previous = previous_config(run)
    if previous is None:
        return False
    if config.minutes:
        config = with_lengths_of(config, previous)
    stages = build_stages(resolve(config, previous, SilentProgress()), run, only)
    return not _to_do(run, stages, only)


def _to_do(run: RunDir, stages: Sequence[Stage], only: Sequence[str]) -> list[str]:
    states = survey(run, stages).states
    return [name for name, state in states.items() if state != "done" and (not only or name in only)]


def _hold(run: RunDir, held: ExitStack, patience_s: float) -> None:
    """Locks the run; an earlier process that died with its host may appear to hold the lock for a while."""
    give_up = time.monotonic() + patience_s
    while True:
        try:
            held.enter_context(run.lock())
            return
        except StorageError:
            raise
        except ModelwrightError:
            if time.monotonic() >= give_up:
                raise
        time.sleep(1.0)


@contextmanager
def _journal(
    run: RunDir,
    config: RunConfig,
    origin: str,
    words: Sequence[str],
    ranks: process_group.RunGroup,
    kernels: Mapping[str, Any],
) -> Iterator[Callable[[Stage, Manifest], None]]:
    """Maintains run.json on the first process: an entry for this invocation, the end of the block, and the digests of
    each stage reported to the yielded function. A collective that fails because another process has left is raised as
    `PeerLost`.
    """
    is_first, folder = ranks.rank == 0, Path(__file__).resolve().parents[1]
    info: dict[str, Any] = {"name": config.name, "created": now(), "invocations": [], "stages": {}}
    entry: dict[str, Any] = {}
    if is_first:
        with suppress(ArtifactError):
            info = run.read_info()
        entry |= {
            "started": now(),
            "command": ["modelwright", *redact_words(words)],
            "origin": origin,
            # The commit of this package's own checkout; "" if it is installed from a wheel.
            "commit": "" if "site-packages" in folder.parts else git_commit(folder),
            "versions": {"modelwright": VERSION, **versions(*PACKAGES)},
            "hardware": hardware() | {"device": str(ranks.world.device), "num_threads": config.hardware.num_threads},
            "kernels": dict(kernels),
            "world_size": ranks.size,
            "restart": num_restarts(),
            "state": "running",
        }
        if ranks.placement:
            entry["placement"] = asdict(ranks.placement)
        info["invocations"].append(entry)
        run.write_info(info)

    def stage_done(stage: Stage, manifest: Manifest) -> None:
        digests = {"digest": manifest.digest, "content": manifest.content_digest, "parents": dict(manifest.inputs)}
        info["stages"][stage.name] = digests
        run.write_info(info)

    try:
        yield stage_done
    except BaseException as error:
        if is_first:
            entry |= {"ended": now(), "state": "stopped" if isinstance(error, STOPPING) else "failed"}
            entry |= {"error": str(error)} if str(error) else {}
            with suppress(OSError):  # a full disk must not hide the failure
                run.write_info(info)
        if isinstance(error, RuntimeError) and ranks.size > 1:
            raise process_group.as_lost_peer(error) from error
        raise
    if is_first:
        entry |= {"ended": now(), "state": "done"}
        run.write_info(info)


@dataclass(frozen=True, kw_only=True)
class BorrowedRows:
    """Rows of a run's first training. folder: folder of `train` and `heldout`; parents: artifacts that a training
    without a stage before it reads, by stage name.
    """

    folder: Path
    parents: Mapping[str, Path]


def borrowed_rows(
    config: RunConfig, run: RunDir, folder: Path, words: Sequence[str], progress: Progress
) -> BorrowedRows:
    """Returns the rows of the first training of a resolved configuration, packed below `folder` unless the run has
    finished ones that match. words: command line, the command's name first.
    """
    rows, place = config.trainings[0].rows, run
    assert rows is not None
    if survey(run, build_stages(config, run)).states[PACK.name] != "done":
        place = RunDir(folder / "data")
        # All stages stay in the configuration, because the trainings decide which rows are packed.
        before = config.stage_names[: config.stage_names.index(PACK.name) + 1]
        data = replace(config, minutes=0.0)
        execute(data, place, only=before, origin=words[0], words=words, progress=progress)
    parents = {name: place.stage(name).artifact for name in (PACK.name, tokenizer_stage(config))}
    if config.init_from:
        parents[INIT.name] = Path(config.init_from)
    return BorrowedRows(folder=parents[PACK.name] / rows.name, parents=parents)
