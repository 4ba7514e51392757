"""Settings of earlier versions: a run that uses one is told its new name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from modelwright.core.config import load_yaml
from modelwright.core.errors import ConfigError

_CONSTANT = "is no longer a setting; remove it"

_TOP = {
    "heldout_tokens": "validation_tokens",
    "report": _CONSTANT,
    "serve.server": "serve",
    "serve.questions": "serve_check.questions",
    "serve.num_heldout_questions": "serve_check.num_validation_questions",
    "serve.max_tokens": "serve_check.max_tokens",
    "serve.temperature": "serve_check.temperature",
    "serve.start_timeout_s": _CONSTANT,
    "parallel.shard": "parallel.zero_stage (none is 0, optimizer 1, gradients 2, full 3)",
    "parallel.shard_group": "parallel.shard_group_size",
    "parallel.share_memory": "parallel.shared_memory",
    "parallel.lost_after_s": "parallel.heartbeat_timeout_s",
    "parallel.placement": "parallel.reorder_ranks",
    "data.heldout_fraction": "data.validation_fraction",
    "data.section_chars": "data.max_document_chars",
    "data.builtin_fraction": "data.stdlib_fraction",
    "clean.normalize": _CONSTANT,
    "clean.length.min_chars": "clean.quality.limits (min_num_chars)",
    "clean.length.max_chars": "clean.quality.limits (max_num_chars)",
    "clean.length.min_answer_chars": "clean.quality.limits (qa.min_num_chars)",
    "clean.length": "clean.quality.limits",
    "clean.repetition.max_data_fraction": "clean.quality.limits (max_data_fraction)",
    "clean.repetition.max_duplicate_line_fraction": "clean.quality.limits (max_duplicate_line_fraction)",
    "clean.repetition.max_duplicate_line_fraction_code": "clean.quality.limits (code.max_duplicate_line_fraction)",
    "clean.repetition": "clean.quality.limits",
    "clean.noise.enabled": "clean.noise.trusted (naming trusted text switches the stage on)",
    "clean.noise.min_precision": _CONSTANT,
    "clean.duplicates.check_contained": "clean.duplicates.contained (true is all, false is off)",
    "pack.overlong": "pack.long_documents (cut is split)",
    "pack.shard_bytes": _CONSTANT,
    "quantize": "serve.int8",
    "evaluate.kinds": "evaluate.domains",
    "evaluate.max_bytes_per_kind": "evaluate.max_bytes_per_domain",
    "evaluate.bigram_tokens": _CONSTANT,
    "evaluate.seed": _CONSTANT,
    "evaluate.multiple_choice.min_answer_bytes": _CONSTANT,
    "evaluate.multiple_choice.max_answer_bytes": _CONSTANT,
    "evaluate.multiple_choice.seed": _CONSTANT,
}
"""Old key, and the new one or what became of it."""

_STAGE = {
    "num_microbatches": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm",
    "rate_rule": "lr_scaling, with lr_reference_batch_tokens",
    "dynamic_decay.above_norm": "weight_decay_schedule.grad_norm_threshold",
    "dynamic_decay": "weight_decay_schedule",
    "offload_optimizer": "optimizer_cpu_offload",
    "update_in_backward": "optimizer_in_backward (true or false)",
    "memory_arena": "step_arena",
    "adaptive_clip.window": _CONSTANT,
    "adaptive_clip.percentile": _CONSTANT,
    "adaptive_clip.deviations": _CONSTANT,
    "schedule.final_fraction": "schedule.final_lr_fraction",
    "schedule.first_fraction": _CONSTANT,
    "precision.layers": "precision.overrides",
    "precision.results": "precision.output_dtype",
    "precision.evaluation": "precision.eval_dtype",
    "precision.tf32": "precision.fp32_matmul (tf32)",
    "precision.onednn": "precision.fp32_matmul (onednn, default or auto)",
    "precision.fp8.history": _CONSTANT,
    "precision.fp8.gradients": "precision.fp8.grad_dtype",
    "precision.fp8.weight_gradient": "precision.fp8.wgrad_high_precision (wide is true)",
    "precision.fp8.cache": "precision.fp8.save_quantized_input",
    "precision.int8.stochastic": "precision.int8.stochastic_rounding",
    "precision.int8.weight_gradient": "precision.int8.wgrad_high_precision (wide is true)",
    "precision.adaptive.every": "precision.adaptive.decide_every_steps",
    "precision.adaptive.narrow": "precision.adaptive.low_precision",
    "precision.adaptive.window": _CONSTANT,
    "precision.adaptive.min_gain": _CONSTANT,
    "precision.adaptive.hold": _CONSTANT,
    "precision.adaptive.spike": _CONSTANT,
    "precision.adaptive.explore": _CONSTANT,
    "precision.adaptive.damage_weight": _CONSTANT,
    "precision.loss_scale.use": "precision.loss_scale.enabled",
    "precision.loss_scale.initial": "precision.loss_scale.init_scale",
    "precision.loss_scale.window": "precision.loss_scale.growth_interval",
    "precision.loss_scale.growth": _CONSTANT,
    "precision.loss_scale.backoff": _CONSTANT,
    "precision.loss_scale.smallest": _CONSTANT,
    "precision.loss_scale.largest": _CONSTANT,
    "precision.loss_scale.max_small": _CONSTANT,
    "activations.mode": "activation_checkpointing.mode (unit is full)",
    "activations.unit_layers": "activation_checkpointing.layers_per_segment",
    "activations.keep": "activation_checkpointing.save_outputs_of",
    "activations.offload_folder": "activation_checkpointing.offload_dir",
    "activations": "activation_checkpointing",
    "transport.kind": "gradient_sync.kind (exact is allreduce, planned topology_aware, three_level topk_quantized)",
    "transport.three_level.keep": "gradient_sync.topk_quantized.topk_fraction",
    "transport.three_level": "gradient_sync.topk_quantized",
    "transport.collectives": "gradient_sync.topology",
    "transport.local_steps.every": "gradient_sync.local_sgd.sync_every_steps",
    "transport.local_steps.rate": "gradient_sync.local_sgd.outer_lr",
    "transport.local_steps.momentum": "gradient_sync.local_sgd.outer_momentum",
    "transport.local_steps.keep_own": "gradient_sync.local_sgd.keep_residual",
    "transport.local_steps.moment_every": "gradient_sync.local_sgd.sync_second_moment_every",
    "transport.local_steps": "gradient_sync.local_sgd",
    "transport": "gradient_sync",
    "asynchronous.mode": "async_updates.mode",
    "asynchronous.delay": "async_updates.delay_steps",
    "asynchronous.compensation": "async_updates.delay_compensation",
    "asynchronous": "async_updates",
    "spikes.num_sigmas": "loss_spikes.num_sigmas",
    "spikes.rollback_after": "loss_spikes.rollback_after",
    "spikes.max_rollbacks": "loss_spikes.max_rollbacks",
    "spikes.lower_rate": "loss_spikes.lr_factor",
    "spikes": "loss_spikes",
    "balance.stages": "load_balance.pipeline",
    "balance.tokens": "load_balance.tokens",
    "balance": "load_balance",
    "sparse.kind": "sparse_updates.kind (prefix is freeze_prefix)",
    "sparse.keep": "sparse_updates.keep_fraction",
    "sparse.course": "sparse_updates.density_schedule",
    "sparse.signal": "sparse_updates.signal",
    "sparse.batch.signal": "batch_selection.signal (change is loss_change)",
    "sparse.batch.keep": "batch_selection.keep_fraction",
    "sparse.batch.probe_len": "batch_selection.probe_tokens",
    "sparse.batch.explore": "batch_selection.random_fraction",
    "sparse.batch.max_start_loss": "batch_selection.max_initial_loss",
    "sparse.batch.keep_tokens": "batch_selection.keep_token_fraction",
    "sparse.batch": "batch_selection",
    "sparse": "sparse_updates",
    "watch.num_sigmas": "anomalies.num_sigmas",
    "watch": "anomalies",
    "guards.replica_check_every": "fault_tolerance.replica_check_every_steps",
    "guards.hang_after_s": "fault_tolerance.watchdog_timeout_s",
    "guards.memory_every_steps": "fault_tolerance.in_memory_checkpoint_every_steps",
    "guards.out_of_memory": "fault_tolerance.on_out_of_memory (halve is halve_microbatch, stop is fail)",
    "guards.stragglers": "fault_tolerance.stragglers",
    "guards": "fault_tolerance",
}
"""The same within `training`, `pretrain` and `sft`."""

_ENGINE = {
    "max_running": "max_num_seqs",
    "cache_tokens": "kv_cache_tokens",
    "block_len": "block_size",
    "prefill_chunk": "prefill_chunk_size",
    "prefill_budget": "max_num_batched_tokens",
}
_SERVER = {"max_queue": "max_queued", "max_choices": "max_completions", "body_timeout_s": _CONSTANT}

RENAMED = (
    _TOP
    | {f"{stage}.{old}": new for stage in ("training", "pretrain", "sft") for old, new in _STAGE.items()}
    | {f"serve.{old}": new if new == _CONSTANT else f"serve.{new}" for old, new in _SERVER.items()}
    | {f"serve.engine.{old}": f"serve.engine.{new}" for old, new in _ENGINE.items()}
)
_RENAMED_VALUES = {
    "hardware.device": {"best": "auto"},
    "pack.mode": {"pad": "one_per_row"},
    "evaluate.multiple_choice.score": {"gain": "pmi"},
} | {
    f"{stage}.{key}": values
    for stage in ("training", "pretrain", "sft")
    for key, values in {
        "precision.policy": {"fastest": "auto"},
        "optimizer": {
            "adamw_int8": "adamw_8bit",
            "adamw_bf16": "adamw_bf16_states",
            "deepseek_adam": "adamw with weight_decay_schedule.grad_norm_threshold 5",
        },
    }.items()
}


def check_renamed(data: Mapping[str, Any]) -> None:
    """Raise `ConfigError` that names the new key if `data`, the plain form of a run's configuration, has one of an
    earlier version.
    """
    for key, value in _entries(data):
        if key in RENAMED:
            raise ConfigError(f"{key}: {new_name(key)}")
        if isinstance(value, str) and (new := _RENAMED_VALUES.get(key, {}).get(value)):
            raise ConfigError(f"{key}: {value!r} is now called {new}")
    if "python" in _sources(data):
        raise ConfigError("data.sources: 'python' is now called 'stdlib'")


def read_run_config(path: Path) -> dict[str, Any]:
    """The plain form of a run's config.yaml. Raises `ConfigError` for one that an earlier version has written."""
    data = load_yaml(path)
    try:
        check_renamed(data)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error} (the run was made by an earlier version: continue it with that version, or start a new "
            "run in another --run-dir)"
        ) from None
    return data


def new_name(key: str) -> str:
    """What became of a key in `RENAMED`, as text."""
    new = RENAMED[key]
    stage = key.partition(".")[0] if key.startswith(("training.", "pretrain.", "sft.")) else ""
    return new if new == _CONSTANT else f"is now called {f'{stage}.{new}' if stage else new}"


def _entries(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, inner ones first."""
    for name, value in data.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _entries(cast(Mapping[str, Any], value), key)
        yield key, value


def _sources(data: Mapping[str, Any]) -> list[str]:
    section = data.get("data")
    sources = cast(Mapping[str, Any], section).get("sources", ()) if isinstance(section, Mapping) else ()
    return [sources] if isinstance(sources, str) else [str(source) for source in cast(list[Any], sources or ())]
