"""Resolves a configuration once, when a run is created: paths become absolute, the model is that of the folder to start
from, and `auto` becomes a device, threads, a precision or GEMM kernels of this machine.

Resolved values are kept while the setting stays `auto`, so that a rerun on a busier machine cannot change them. Two
configurations are the same run if their sources and the model that is trained are the same.
"""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from modelwright.compress.int8 import HOPELESS, backend_times, quantize_rows
from modelwright.core.artifacts import RunDir, is_finished
from modelwright.core.config import ConfigError, dump, flatten
from modelwright.core.progress import Progress
from modelwright.core.resources import OtherProcesses, default_num_threads, hardware, num_usable_cores
from modelwright.core.texts import redact_text
from modelwright.data.clean.config import CleanConfig
from modelwright.model.decoder import ModelConfig
from modelwright.ops.matmul import is_emulated
from modelwright.ops.microbenchmark import undisturbed
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.estimate.doctor import busy_note, measure_rates
from modelwright.pipeline.stage import HardwareConfig, RunConfig
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.init import initial_folder
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.student import STUDENT, StudentConfig
from modelwright.train.precision.apply import fp32_products
from modelwright.train.precision.controllers import onednn_speed_up
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.precision.policy import resolve as resolve_precision

PROBE_TOKENS = 2048
BUDGET_S = 2.0
"""Maximum tokens with which rates are measured, and seconds for each format."""
CLEARLY_FASTER = 1.2
"""Speed-up from which oneDNN makes FP32 products: 1.9 to 2.2 on AMD EPYC with AVX-512 (the ledger,
adaptive_precision), and no measurement of equally fast ones is off by so much."""
INT8_ROUNDS = 3
SHOWN = 3
"""Number of differences that the error about another run lists."""
_REMEDY = "run again when the machine is quiet, or set precision.policy yourself"


def resolve(config: RunConfig, previous: RunConfig | None, progress: Progress, run: RunDir | None = None) -> RunConfig:
    """Returns the configuration with every `auto` replaced by a value for this machine.

    previous: the resolved configuration of the same run folder; its choices are kept if the model is the same. run:
    that folder, if results of another run in it, which this one would replace, are a `ConfigError`.
    """
    config = resolve_inputs(config)
    changes = differences(config, previous) if previous else []
    if run and changes:
        check_same_run(changes, run)
    wish, kept = config.hardware, previous.hardware if previous else None
    check_threads(wish.num_threads)
    # A resumed run keeps its threads, because its bits depend on them, unless fewer cores exist now.
    threads = wish.num_threads or (min(kept.num_threads, num_usable_cores()) if kept else default_num_threads())
    device = kept.device if kept and wish.device == "auto" else resolved_device(wish.device)
    check_device(device)
    config = replace(config, hardware=HardwareConfig(device=device, num_threads=threads))
    if any(change.startswith("model.") for change in changes):
        previous = None
    config = _decide(config, previous if device == "cpu" else None, "fp32_matmul", _measure_fp32, progress)
    config = _decide(config, previous, "policy", _measure_policy, progress)
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


def resolve_inputs(config: RunConfig) -> RunConfig:
    """Returns the configuration as it means the same from any folder: paths that the data stages read are absolute, and
    with `init_from` the model's shape is that of the folder. Raises `ConfigError` if rows exceed its context.
    """
    data, other, cache = config.data, config.rows_from, config.cache
    row_len, cleans = config.section(PACK).seq_len if config.has(PACK) else 0, config.has(CLEAN)
    config = replace(
        config,
        data=replace(data, sources=tuple(map(_absolute, data.sources)), schema=_absolute_path(data.schema)),
        rows_from=other.rstrip("/") if "://" in other else _absolute_path(other),
        cache=replace(cache, folder=_absolute_path(cache.folder)),
    )
    if STUDENT.name in config.sections:
        student: StudentConfig = config.section(STUDENT)
        student = replace(student, teacher=_absolute_path(student.teacher))
        config = config.with_sections({STUDENT.name: student})
    if config.init_from:
        from modelwright.model.hf import load_config

        folder = initial_folder(config.init_from)
        model = load_config(folder)
        if row_len > model.max_seq_len:
            raise ConfigError(
                f"pack.seq_len: {row_len} is more than the model's context of {folder} "
                f"({model.max_seq_len}); lower pack.seq_len"
            )
        config = replace(config, model=model, init_from=str(folder))
    if cleans:
        clean: CleanConfig = config.section(CLEAN)
        config = config.with_sections({CLEAN.name: clean.replace_paths(_absolute, _absolute_path)})
    return config


def is_same_run(config: RunConfig, previous: RunConfig) -> bool:
    """Returns True if both describe the same run: the sources and the model that is trained are the same."""
    return not differences(config, previous)


def check_same_run(changes: Sequence[str], run: RunDir) -> None:
    """Raises `ConfigError` if `run` has results of a run that differs in `changes`, which this one would replace."""
    # Results are finished stages, and checkpoints of a training.
    stages = [run.stage(path.parent.name) for path in run.path.glob("*/stage.json")]
    if not any(is_finished(one.artifact) or any(one.checkpoints.glob("*")) for one in stages):
        return
    more = [f"{len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    raise ConfigError(
        f"{run.path}: contains another run ({'; '.join([*changes[:SHOWN], *more])}); choose another --run-dir, or "
        "replace that run with --restart"
    )


def differences(config: RunConfig, previous: RunConfig) -> list[str]:
    """Returns each setting that makes two runs different ones, as `model.num_layers: was 6, now 2`."""
    config = resolve_inputs(config)
    identities: list[dict[str, Any]] = []
    for one in (previous, config):
        # As plain data, because a model that was read from a file has no constants.
        model = {f"model.{name}": value for name, value in dump(one.model).items()}
        sources = list(one.data.sources) if not one.rows_from else []
        identities.append({"rows_from": one.rows_from, "data.sources": sources, "init_from": one.init_from, **model})
    before, now = identities
    changes: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        if before[key] != now[key]:
            values = (one if isinstance(one, list) else [one] for one in (before[key], now[key]))
            old, new = (redact_text(" ".join(map(str, value))) or "''" for value in values)
            changes.append(f"{key}: was {old}, now {new}")
    return changes


def local_inputs(config: RunConfig) -> dict[str, str]:
    """Returns the files and folders of this machine that a run reads, by setting; other machines may lack them."""
    inputs: dict[str, str] = {}
    for name, value in flatten(dump(resolve_inputs(config))):
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
    device, num_tokens = resolved_device(config.hardware.device), _probe_tokens(config)
    with fp32_products(onednn=precision.fp32_matmul == "onednn"):
        result = measure_rates(config.model, num_tokens=num_tokens, device=device, budget_s=BUDGET_S)
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


def _decide(
    config: RunConfig,
    previous: RunConfig | None,
    setting: str,
    measure: Callable[[RunConfig, Progress], str],
    progress: Progress,
) -> RunConfig:
    """Replaces `auto` in a setting of `precision` by the earlier choices of the run, or by what is measured here."""
    stages = [one.name for one in config.trainings if getattr(config.section(one).precision, setting) == "auto"]
    if not stages:
        return config
    if previous and previous.trainings:
        # A training that is new in the run uses the choice of the run's first one.
        before = [previous.sections.get(name, previous.first_training) for name in stages]
        chosen = {name: getattr(one.precision, setting) for name, one in zip(stages, before, strict=True)}
    else:
        chosen = dict.fromkeys(stages, measure(config, progress))
    precisions = {name: replace(config.section(name).precision, **{setting: value}) for name, value in chosen.items()}
    config = config.with_sections(
        {name: replace(config.section(name), precision=precision) for name, precision in precisions.items()}
    )
    # A choice that all trainings share moves to the section that they inherit, which keeps config.yaml short.
    if len(chosen) == len(config.trainings) and len(set(chosen.values())) == 1:
        shared = replace(config.training.precision, **{setting: chosen[stages[0]]})
        config = replace(config, training=replace(config.training, precision=shared))
    return config


def _measure_fp32(config: RunConfig, progress: Progress) -> str:
    """Returns the faster kernels of FP32 matrix products; only the CPU has a choice."""
    if config.hardware.device != "cpu":
        return "default"
    check_size(config.model)
    torch.set_num_threads(config.hardware.num_threads)
    measure = partial(onednn_speed_up, matrix_shapes(config.model), num_rows=_probe_tokens(config))
    speed_up = undisturbed(measure, OtherProcesses()).value
    if speed_up < CLEARLY_FASTER:
        return "default"
    progress.note(f"FP32 products: oneDNN's, as exact as PyTorch's own and {speed_up:.1f}x as fast here")
    return "onednn"


def _measure_policy(config: RunConfig, progress: Progress) -> str:
    """Returns the fastest precision policy."""
    torch.set_num_threads(config.hardware.num_threads)
    rates = measured_rates(config, config.first_training.precision, progress.note)
    if is_emulated(torch.bfloat16, torch.device(config.hardware.device)):
        # Emulated BF16 is FP32 products with casts: never faster, even if a disturbed measurement says so.
        rates = {name: rate for name, rate in rates.items() if name != "bf16"}
    best = resolve_precision(PrecisionConfig(policy="auto"), rates)
    shown = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
    progress.note(f"precision policy: {best.policy} (measured at the model's shapes: {shown})")
    return best.policy


def _absolute_path(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute(source: str) -> str:
    """Makes a local path or glob absolute; returns addresses and names of built-in corpora unchanged."""
    if "://" in source:
        return source
    looks_local = os.sep in source or "." in source or glob.has_magic(source) or Path(source).exists()
    return str(Path(source).expanduser().absolute()) if looks_local else source
