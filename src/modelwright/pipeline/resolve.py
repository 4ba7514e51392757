"""Resolves `auto` settings once, when a run is created: device, threads, precision, GEMM kernels; makes paths absolute.

Resolved values are kept while the setting stays `auto`, so that a rerun on a busier machine cannot change them. The
kernels for CPUs are written to run.json and are the same on all processes of the run, so that its bits stay the same
when it is resumed.
"""

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.compress.int8 import HOPELESS, backend_times
from modelwright.compress.int8_linear import quantize_rows
from modelwright.core.busy import OtherProcesses
from modelwright.core.config import dump, flatten
from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.core.progress import Progress
from modelwright.core.resources import default_num_threads, hardware, num_usable_cores
from modelwright.core.rundir import RunDir
from modelwright.data.clean.config import CleanConfig
from modelwright.model.config import ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.kernel_speed import KERNELS
from modelwright.ops.lowp_emulation import is_emulated
from modelwright.ops.microbenchmark import undisturbed
from modelwright.parallel.mesh import World
from modelwright.pipeline.config import HardwareConfig, RunConfig
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.estimate.doctor import busy_note, measure_rates
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.model_folder import initial_folder
from modelwright.pipeline.stages.pack import check_context
from modelwright.pipeline.stages.student import STUDENT, StudentConfig
from modelwright.train.precision.apply import fp32_products
from modelwright.train.precision.hardware import onednn_speed_up
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.precision.policy import resolve as resolve_precision

PROBE_TOKENS = 2048
BUDGET_S = 2.0
"""Maximum tokens with which rates are measured, and seconds for each format."""
CLEARLY_FASTER = 1.2
"""Speed-up from which oneDNN makes FP32 products: 1.9 to 2.2 on AMD EPYC with AVX-512 (`docs/claims.md`,
adaptive_precision), and no measurement of equally fast ones is off by so much."""
INT8_ROUNDS = 3
_REMEDY = "run again when the machine is quiet, or set precision.policy yourself"


def resolve(config: RunConfig, previous: RunConfig | None, progress: Progress) -> RunConfig:
    """Returns the configuration with every `auto` replaced by a value for this machine.

    `previous`: the resolved configuration of the same run folder; its choices are kept if the model is the same.
    """
    config = resolve_paths(resolve_model(config))
    wish, kept = config.hardware, previous.hardware if previous else None
    check_threads(wish.num_threads)
    # A resumed run keeps its threads, because its bits depend on them, unless fewer cores exist now.
    threads = wish.num_threads or (min(kept.num_threads, num_usable_cores()) if kept else default_num_threads())
    device = kept.device if kept and wish.device == "auto" else resolved_device(wish.device)
    check_device(device)
    config = replace(config, hardware=HardwareConfig(device=device, num_threads=threads))
    same_model = previous is not None and dump(previous.model) == dump(config.model)  # a file has no constants
    config = _resolve_onednn(config, previous if same_model else None, progress)
    config = _resolve_precision(config, previous if same_model else None, progress)
    return _resolve_int8(config, previous if same_model else None, progress)


def resolved_device(device: str) -> Literal["cpu", "cuda"]:
    """`auto` is CUDA if available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if device == "cuda" else "cpu"


def check_device(device: str) -> None:
    """Raises `ConfigError` if the machine lacks the device."""
    if device == "cuda" and not torch.cuda.device_count():
        raise ConfigError("hardware.device: PyTorch finds no CUDA device on this machine; choose cpu or auto")


def check_threads(num_threads: int) -> None:
    """Raises `ConfigError` for more threads than cores: they would only make every stage slower."""
    if num_threads > num_usable_cores():
        raise ConfigError(
            f"hardware.num_threads: must be at most {num_usable_cores()}, the cores that this process may use, got "
            f"{num_threads}; 0 is every core, or OMP_NUM_THREADS of them"
        )


def check_size(model: ModelConfig) -> None:
    """Raises `ConfigError` for a model whose weights alone need more memory than the machine has."""
    needed, memory = 4 * model.num_parameters, hardware()["memory_bytes"]
    if needed > memory:
        raise ConfigError(
            f"model: its {model.num_parameters:.3g} parameters take {size(needed)} in FP32, and this machine has "
            f"{size(memory)} of memory; lower model.model_dim ({model.model_dim}), model.num_layers "
            f"({model.num_layers}), model.ffn_dim ({model.ffn_dim}) or model.vocab_size ({model.vocab_size})"
        )


def resolve_model(config: RunConfig) -> RunConfig:
    """Returns the configuration with the model's shape, with `init_from` that of the folder. Raises `ConfigError` if
    rows exceed its context.
    """
    if not config.init_from:
        return config
    from modelwright.model.hf import load_config

    folder = initial_folder(config.init_from)
    config = replace(config, model=load_config(folder), init_from=str(folder))
    check_context(config)
    return config


def resolve_paths(config: RunConfig) -> RunConfig:
    """Makes the paths that the data stages read absolute, so that config.yaml means the same from any folder."""
    data, other = config.data, config.rows_from
    data = replace(data, sources=tuple(map(_absolute, data.sources)), schema=_absolute_path(data.schema))
    config = replace(config, data=data, rows_from=other.rstrip("/") if "://" in other else _absolute_path(other))
    config = replace(config, cache=replace(config.cache, folder=_absolute_path(config.cache.folder)))
    if STUDENT.name in config.sections:
        student: StudentConfig = config.section(STUDENT)
        student = replace(student, teacher=_absolute_path(student.teacher))
        config = config.with_sections({STUDENT.name: student})
    if not config.has(CLEAN):
        return config
    clean: CleanConfig = config.section(CLEAN)
    return config.with_sections({CLEAN.name: clean.replace_paths(_absolute, _absolute_path)})


def local_inputs(config: RunConfig) -> dict[str, str]:
    """Returns the files and folders of this machine that a run reads, by setting; other machines may lack them."""
    inputs: dict[str, str] = {}
    for name, value in flatten(dump(resolve_paths(config))):
        words = [value]
        for word in words:  # which grows by the entries of lists and their settings
            if isinstance(word, (list, dict)):
                words += word.values() if isinstance(word, dict) else word
            elif not isinstance(word, str) or os.sep not in word or name.startswith("cache."):
                continue  # a run makes the folder of its cache
            elif any(glob.iglob(os.path.expanduser(word), recursive=True)):
                inputs.setdefault(name, word)
    return inputs


def matrix_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of each distinct matrix of a model: attention, FFN, head."""
    heads, pairs = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width, wide = model.model_dim, model.ffn_dim
    shapes = [(heads, width), (pairs, width), (width, heads), (wide, width), (width, wide), (model.vocab_size, width)]
    return list(dict.fromkeys(shapes))


def measured_rates(config: RunConfig, precision: PrecisionConfig, note: Callable[[str], None]) -> dict[str, float]:
    """Measures FLOP/s of this process's matrix products in training, at the model's own shapes, by compute format; FP32
    with the kernels that `precision` selects. note: called if other processes kept the machine busy throughout.
    """
    check_size(config.model)
    device = resolved_device(config.hardware.device)
    with fp32_products(onednn=precision.fp32_matmul == "onednn"):
        result = measure_rates(config.model, num_tokens=_probe_tokens(config), device=device, budget_s=BUDGET_S)
    if busy := busy_note(result["busy_cores"], remedy=_REMEDY):
        note(busy)
    return result["effective"]


def _probe_tokens(config: RunConfig) -> int:
    training = config.first_training
    return max(1, min(training.batch_tokens // training.gradient_accumulation_steps, PROBE_TOKENS))


def product_rate(config: RunConfig, precision: PrecisionConfig, note: Callable[[str], None]) -> float:
    """Returns FLOP/s of `measured_rates` in the format of most products; FP16 and FP8 count as BF16 and INT8 as FP32,
    the formats of the rest of such a model.
    """
    known_as = {"fp16": "bf16", "fp8": "bf16", "int8": "fp32"}.get(precision.compute, precision.compute)
    return measured_rates(config, precision, note)[known_as]


def _resolve_onednn(config: RunConfig, previous: RunConfig | None, progress: Progress) -> RunConfig:
    """Chooses the kernels of FP32 matrix products on the CPU."""
    open_stages = _open_stages(config, "fp32_matmul")
    kept = _kept(previous, "fp32_matmul", open_stages)
    if not open_stages:
        return config
    if config.hardware.device != "cpu":
        chosen = dict.fromkeys(open_stages, "default")
    elif kept:
        chosen = kept
    else:
        check_size(config.model)
        torch.set_num_threads(config.hardware.num_threads)
        measure = partial(onednn_speed_up, matrix_shapes(config.model), num_rows=_probe_tokens(config))
        speed_up = undisturbed(measure, OtherProcesses()).value
        chosen = dict.fromkeys(open_stages, "onednn" if speed_up >= CLEARLY_FASTER else "default")
        if speed_up >= CLEARLY_FASTER:
            progress.note(f"FP32 products: oneDNN's, as exact as PyTorch's own and {speed_up:.1f}x as fast here")
    return _with_precision(config, {name: {"fp32_matmul": kernels} for name, kernels in chosen.items()})


def _with_precision(config: RunConfig, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Replaces fields of `precision`. changes: new values by stage."""
    sections = {name: config.section(name) for name in changes}
    precisions = {name: replace(section.precision, **changes[name]) for name, section in sections.items()}
    config = config.with_sections(
        {name: replace(section, precision=precisions[name]) for name, section in sections.items()}
    )
    of_all = next(iter(changes.values()))
    # A choice that all trainings share moves to the section that they inherit, which keeps config.yaml short.
    if len(changes) == len(config.trainings) and all(change == of_all for change in changes.values()):
        precision = replace(config.training.precision, **of_all)
        config = replace(config, training=replace(config.training, precision=precision))
    return config


def _open_stages(config: RunConfig, setting: str) -> list[str]:
    """Returns the trainings in which a setting of `precision` is `auto`."""
    return [one.name for one in config.trainings if getattr(config.section(one).precision, setting) == "auto"]


def _kept(previous: RunConfig | None, setting: str, stages: Sequence[str]) -> dict[str, Any]:
    """Returns the earlier choices of a setting of `precision`, by stage. A training that is new in the run uses the
    choice of the run's first one. Empty if nothing was resolved.
    """
    if not previous or not previous.trainings:
        return {}
    first = previous.first_training
    sections = {name: previous.sections.get(name, first) for name in stages}
    return {name: getattr(section.precision, setting) for name, section in sections.items()}


def _resolve_precision(config: RunConfig, previous: RunConfig | None, progress: Progress) -> RunConfig:
    open_stages = _open_stages(config, "policy")
    if not open_stages:
        return config
    if kept := _kept(previous, "policy", open_stages):
        chosen = kept
    else:
        torch.set_num_threads(config.hardware.num_threads)
        rates = measured_rates(config, config.first_training.precision, progress.note)
        if is_emulated(torch.bfloat16, torch.device(config.hardware.device)):
            # Emulated BF16 is FP32 products with casts: never faster, even if a disturbed measurement says so.
            rates = {name: rate for name, rate in rates.items() if name != "bf16"}
        best = resolve_precision(PrecisionConfig(policy="auto"), rates)
        chosen = dict.fromkeys(open_stages, best.policy)
        shown = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
        progress.note(f"precision policy: {best.policy} (measured at the model's shapes: {shown})")
    return _with_precision(config, {name: {"policy": policy} for name, policy in chosen.items()})


def _resolve_int8(config: RunConfig, previous: RunConfig | None, progress: Progress) -> RunConfig:
    if config.serve.int8.backend != "auto":
        return config
    if previous:
        return replace(
            config, serve=replace(config.serve, int8=replace(config.serve.int8, backend=previous.serve.int8.backend))
        )
    torch.set_num_threads(config.hardware.num_threads)
    matrices = [quantize_rows(torch.randn(shape)) for shape in matrix_shapes(config.model)]
    times = undisturbed(partial(backend_times, matrices, num_rounds=INT8_ROUNDS), OtherProcesses()).value
    best = min(times, key=lambda name: times[name])
    shown = ", ".join(
        f"{name} {1e6 * value:.0f} µs a token" if value <= HOPELESS * times[best] else f"{name} far slower"
        for name, value in times.items()
    )
    progress.note(f"INT8 backend: {best} ({shown})")
    return replace(config, serve=replace(config.serve, int8=replace(config.serve.int8, backend=best)))


def _absolute_path(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute(source: str) -> str:
    """Makes a local path or glob absolute; returns addresses and names of built-in corpora unchanged."""
    if "://" in source:
        return source
    looks_local = os.sep in source or "." in source or glob.has_magic(source) or Path(source).exists()
    return str(Path(source).expanduser().absolute()) if looks_local else source


@contextmanager
def kernels_of_run(run: RunDir, world: World, progress: Progress) -> Iterator[Mapping[str, Any]]:
    """Makes all ranks, and the processes that they start, use the kernels of the first rank within the block. Yields
    `{"instruction_set", "used"}` of the first rank, for run.json.
    """
    choices = world.gather_json(_choice(run, progress))
    choice = choices[0]
    if others := {other["instruction_set"] for other in choices} - {choice["instruction_set"]}:
        names = ", ".join(sorted(_shown(name) for name in others))
        progress.note(f"kernels: ranks compute with {_shown(choice['instruction_set'])} and {names}")
    # As environment variables, which the processes that a rank starts inherit.
    variables = cpu_kernels.as_setting(choice["used"])
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield choice
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _choice(run: RunDir, progress: Progress) -> dict[str, Any]:
    """Returns the kernels that the run used last, on the same instruction set; else the faster ones here. The user's
    own setting wins.
    """
    now = {"instruction_set": cpu_kernels.instruction_set(), "used": sorted(cpu_kernels.used())}
    try:
        invocations = run.read_info()["invocations"]
    except ArtifactError:
        invocations = []  # a new run
    last: dict[str, Any] | None = next((one["kernels"] for one in reversed(invocations) if "kernels" in one), None)
    if last is None or last == now:
        return now
    if last["instruction_set"] != now["instruction_set"]:
        before, here = _shown(last["instruction_set"]), _shown(now["instruction_set"])
        progress.note(f"kernels: the run began with {before} and continues with {here}; last bits of results differ")
        return now
    if cpu_kernels.SWITCH in os.environ:
        progress.note(f"kernels: {cpu_kernels.SWITCH} differs from what the run used; last bits of results differ")
        return now
    return {**now, "used": [name for name in last["used"] if name in KERNELS]}


def _shown(instruction_set: str) -> str:
    return instruction_set or "no kernels"
