"""Adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT loads what `save_adapter` writes, and `load_adapter` reads what PEFT writes, with equal outputs. Where a model type
keeps several projections in one tensor (Phi-3), PEFT has one adapter for all of them: it is written with the factors of
each projection next to each other, and read with its A for each projection and the rows of its B.

The metadata of the tensors' file holds a fingerprint of the weights that the adapter belongs to. PEFT ignores it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from modelwright.core.artifacts import make_folder, write_atomic, writing
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.adapters import ADAPTER, adapters_of, attach_adapters, base_fingerprint, own_projections
from modelwright.model.decoder import Decoder
from modelwright.model.hf import hf_name, hf_tensors, read_json, read_tensors, type_of
from modelwright.model.low_rank import MAGNITUDE, A, AdapterConfig, B, row_norms

Value = TypeVar("Value", int, float)
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PEFT_NAMES = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
"""PEFT's names of an adapter's tensors, by this project's names."""
EMBEDDING, HEAD = "embedding.weight", "head.weight"
END_MODULES = {"model.embed_tokens": EMBEDDING, "lm_head": HEAD}
"""Parameters at the ends of a model by their modules, whose adapters are read as whole weights."""
END_NAMES = ("lora_embedding_A", "lora_embedding_B", "lora_A.weight", "lora_B.weight")
FINGERPRINT = "base_fingerprint"
READ = ("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""Settings that decide the outputs; `target_modules` and its like only select tensors."""
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "modules_to_save",
    "monteclora_config",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
)
"""Settings that change no output of an adapter that has been trained, or that only say which tensors it has."""
DEFAULTS: Mapping[str, Any] = {
    "r": 8,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""PEFT's defaults for settings that are absent or null."""
PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not change the weights of the base."""


@dataclass(frozen=True)
class AdaptedModule:
    """A linear module of a model in the Hugging Face layout, with the projections whose rows it holds, in order."""

    name: str
    projections: Sequence[str]


def modules_of(model: Decoder) -> list[AdaptedModule]:
    """Returns the modules of the blocks that can have adapters."""
    chosen, held = type_of(model.config), dict[str, list[str]]()
    for name in own_projections(model):
        held.setdefault(hf_name(f"{name}.weight", chosen).removesuffix(".weight"), []).append(name)
    return [AdaptedModule(name, projections) for name, projections in held.items()]


def save_adapter(model: Decoder, folder: Path, *, base: str = "") -> None:
    """Write the adapters of a model into `folder` (created if missing). base: path or name of the base model's folder,
    for readers of the config. Raises `ConfigError` for a model without adapters, `StorageError` if writing fails.
    """
    own, modules = model.adapters, modules_of(model)
    if not own.r:
        raise ConfigError(f"{folder}: the model lacks adapters to write; train with lora.r above 0")
    adapters, tensors = adapters_of(model), dict[str, Tensor]()
    ranks, alphas = dict[str, int](), dict[str, float]()
    for module in modules:
        if any(name in adapters for name in module.projections):
            rank, scale, written = _fused(model, module)
            # 12 digits undo the rounding of alpha / rank * rank, so that the alpha that was set is written
            alpha = float(f"{scale * (math.sqrt(rank) if own.use_rslora else rank):.12g}")
            ranks[module.name], alphas[module.name] = rank, int(alpha) if alpha.is_integer() else alpha
            tensors |= {f"{PREFIX}{module.name}.{PEFT_NAMES[name]}": one for name, one in written.items()}
    names = [module.name for module in modules]
    rank, rank_pattern = compressed(ranks, names)
    alpha, alpha_pattern = compressed(alphas, names)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": own.lora_dropout,
        "target_modules": groups_of(ranks, names),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": own.use_rslora,
        "use_dora": own.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    make_folder(folder)
    write_atomic(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    with writing(folder):
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, folder / TENSORS, metadata={"format": "pt", FINGERPRINT: model.base_fingerprint})


def load_adapter(model: Decoder, folder: Path) -> None:
    """Attach the adapters of a folder to a model in memory without adapters, in place. Training can continue with a
    `lora` section of the same form (`model.adapters`).

    Raises `ModelError` that names setting or tensor when the folder has a feature of PEFT that is not supported, lacks
    tensors, or belongs to another model.
    """
    read = read_adapter(model, folder)
    read.require_low_rank(folder)
    attach_adapters(model, read.config, seed=0)
    with torch.no_grad():
        for name, value in read.values.items():
            model.get_parameter(name).copy_(value)


@dataclass(frozen=True)
class ReadAdapter:
    """Adapter folder for one model: settings, and the values of the adapters' parameters by name. weights: values that
    replace weights of the model by their names (`modules_to_save`, biases, adapted embeddings), which may have more or
    fewer rows than the model's vocabulary; ties_ends: `ensure_weight_tying`, embedding and head get the same one.
    """

    config: AdapterConfig
    values: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    ties_ends: bool

    def require_low_rank(self, folder: Path) -> None:
        """Raise `ModelError` for an adapter that replaces weights, which only a merge can."""
        if self.weights or not self.config.r:
            raise ModelError(
                f"{folder}: modules_to_save, bias: the adapter has its own {', '.join(list(self.weights)[:3])}, which "
                f"cannot be next to the model's; merge it first: modelwright merge MODEL {folder} DEST"
            )


def read_adapter(model: Decoder, folder: Path) -> ReadAdapter:
    """Read a folder for this model without changing the model. Raises `ModelError` as `load_adapter` does."""
    path = folder / CONFIG
    settings = _checked_settings(path)
    stored, metadata = read_tensors(folder / TENSORS)
    fingerprint = model.base_fingerprint or base_fingerprint(model)
    if metadata.get(FINGERPRINT, fingerprint) != fingerprint:
        raise ModelError(
            f"{folder}: the adapter belongs to other weights than this model's; load the model that it names"
        )
    modules = {module.name: module for module in modules_of(model)}
    own_weights, stored = _own_weights(model, folder, settings, stored)
    by_module = _by_module(folder, stored, modules)
    _check_targets(path, settings, list(modules), found=set(by_module))
    ranks, alphas, values = dict[str, int](), dict[str, float](), dict[str, Tensor]()
    for name, tensors in by_module.items():
        matched = _rank_and_alpha(settings, name)
        rank, rows_of = int(matched[0]), _rows_of(model, modules[name].projections)
        first, num_outputs = next(iter(rows_of)), max(rows.stop for rows in rows_of.values())
        shapes = {A: (rank, model.projections()[first].in_features), B: (num_outputs, rank), MAGNITUDE: (num_outputs,)}
        if not settings["use_dora"]:
            del shapes[MAGNITUDE]
        for own in [*shapes, *(own for own in tensors if own not in shapes)]:
            place = f"{folder / TENSORS}: {PREFIX}{name}.{PEFT_NAMES[own]}"
            if own not in tensors:
                raise ModelError(f"{place}: is missing; copy the folder again")
            if own not in shapes:
                raise ModelError(f"{place}: belongs to DoRA, but use_dora is false in {CONFIG}; copy the folder again")
            if tuple(tensors[own].shape) != shapes[own]:
                raise ModelError(
                    f"{place}: has shape {list(tensors[own].shape)} instead of {list(shapes[own])}; load the model "
                    "that the adapter belongs to"
                )
        for projection, rows in rows_of.items():
            ranks[projection], alphas[projection] = rank, float(matched[1])
            parts = {A: tensors[A], **{key: tensors[key][rows] for key in tensors if key != A}}
            values |= {f"{projection}{ADAPTER}{key}": value for key, value in parts.items()}
    ties_ends = bool(settings.get("ensure_weight_tying"))
    if not ranks:
        return ReadAdapter(AdapterConfig(), {}, own_weights, ties_ends)
    names = list(model.projections())
    rank, rank_pattern = compressed(ranks, names)
    alpha, alpha_pattern = compressed(alphas, names)
    config = AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=float(settings["lora_dropout"]),
        target_modules=tuple(map(re.escape, groups_of(ranks, names))),
        use_rslora=bool(settings["use_rslora"]),
        use_dora=bool(settings["use_dora"]),
        rank_pattern={re.escape(name): one for name, one in rank_pattern.items()},
        alpha_pattern={re.escape(name): one for name, one in alpha_pattern.items()},
    )
    return ReadAdapter(config, values, own_weights, ties_ends)


def _rank_and_alpha(settings: Mapping[str, Any], name: str) -> tuple[int, float]:
    # As in PEFT, the first pattern counts that matches the end of the module's name
    rank, alpha = (
        next((one for key, one in settings[patterns].items() if re.match(rf"(.*\.)?({key})$", name)), settings[default])
        for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    return int(rank), float(alpha)


def _own_weights(
    model: Decoder, folder: Path, settings: Mapping[str, Any], stored: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights that replace those of the model, by this project's names, and the tensors that are left.

    PEFT writes `modules_to_save` and biases under the names of the modules, with `base_layer` where a module also
    has an adapter. An adapter of the embedding or the output head becomes a whole weight: W + s B A.
    """
    weights, rest = dict[str, Tensor](), dict[str, Tensor]()
    adapted = dict[str, dict[str, Tensor]]()
    tensors = {**hf_tensors(model, type_of(model.config)), "lm_head.weight": [HEAD]}
    parameters = dict(model.named_parameters())
    parameters.setdefault(HEAD, parameters[EMBEDDING])
    saved = "\n".join(stored).replace(".modules_to_save.", ".")
    for module in settings.get("modules_to_save") or ():
        if not re.search(rf"\.{re.escape(module)}\.(.+\.)?(weight|bias)$", saved, re.MULTILINE):
            raise ModelError(f"{folder / CONFIG}: modules_to_save: {TENSORS} lacks {module}; copy the folder again")
    for name, tensor in stored.items():
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        module, own = next(
            ((plain.removesuffix(f".{end}"), end) for end in END_NAMES if plain.endswith(f".{end}")), ("", "")
        )
        if name.startswith(PREFIX) and plain in tensors:
            parts = [parameters[one].shape for one in tensors[plain]]
            wanted = [sum(shape[0] for shape in parts), *parts[0][1:]]
            is_end = tensors[plain][0] in (EMBEDDING, HEAD)  # their rows may have changed with the vocabulary
            if list(tensor.shape[is_end:]) != wanted[is_end:] or tensor.dim() != len(wanted):
                raise ModelError(
                    f"{folder / TENSORS}: {name}: has shape {list(tensor.shape)} instead of {wanted}; load the model "
                    "that the adapter belongs to"
                )
            lengths = [len(tensor)] if is_end else [shape[0] for shape in parts]
            weights |= dict(zip(tensors[plain], torch.split(tensor, lengths), strict=True))
        elif name.startswith(PREFIX) and module in END_MODULES:
            adapted.setdefault(module, {})[own] = tensor
        else:
            rest[name] = tensor
    for module, factors in adapted.items():
        if settings["use_dora"]:
            raise ModelError(f"{folder / CONFIG}: use_dora: adapters of {module} cannot be loaded; LoRA's can")
        parameter, (rank, alpha) = END_MODULES[module], _rank_and_alpha(settings, module)
        names = END_NAMES[:2] if parameter == EMBEDDING else END_NAMES[2:]
        base = weights.get(parameter, parameters[parameter].detach())
        shapes = [(rank, base.shape[n]) for n in ((0, 1) if parameter == EMBEDDING else (1, 0))]
        found = [tuple(factors[one].shape) if one in factors else () for one in names]
        if found != [shapes[0], shapes[1][::-1]]:
            raise ModelError(
                f"{folder / TENSORS}: {PREFIX}{module}: its factors {', '.join(names)} are missing or of another shape "
                "than the model's; load the model that the adapter belongs to"
            )
        scale = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
        product = scale * (factors[names[1]].to(base.dtype) @ factors[names[0]].to(base.dtype))
        weights[parameter] = base + (product.T if parameter == EMBEDDING else product)
    if len({weights[one].shape[0] for one in (EMBEDDING, HEAD) if one in weights} | {model.config.vocab_size}) > 1:
        is_whole = model.config.tie_embeddings or {EMBEDDING, HEAD} <= weights.keys()
        rows = {weights[one].shape[0] for one in (EMBEDDING, HEAD) if one in weights}
        if not is_whole or len(rows) > 1:
            raise ModelError(f"{folder / TENSORS}: embedding and output head have rows for different vocabularies")
    return weights, rest


def _fused(model: Decoder, module: AdaptedModule) -> tuple[int, float, dict[str, Tensor]]:
    """Returns rank, scale and tensors of one PEFT adapter for all projections of a module: their A below each other,
    their B along the diagonal. Factors of scales that differ are in B. A projection without adapter has zeros, and the
    lengths of its rows as magnitudes.
    """
    adapters, rows = adapters_of(model), _rows_of(model, module.projections)
    held = {name: adapters[name] for name in module.projections if name in adapters}
    first = next(iter(held.values()))
    rank, scale = sum(one.rank for one in held.values()), first.scale
    b_OR = first.lora_B.new_zeros(max(own.stop for own in rows.values()), rank)
    # PEFT has one scale for the module: that of the first projection; B makes up for the others
    done = 0
    for name, one in held.items():
        b_OR[rows[name], done : done + one.rank] = one.lora_B.detach() * (one.scale / scale)
        done += one.rank
    tensors = {A: torch.cat([one.lora_A.detach() for one in held.values()]), B: b_OR}
    if model.adapters.use_dora:
        lengths = [
            held[name].get_parameter(MAGNITUDE).detach()
            if name in held
            else torch.cat([row_norms(rows.detach()) for rows in model.projections()[name].row_blocks()])
            for name in module.projections
        ]
        tensors[MAGNITUDE] = torch.cat(lengths)
    return rank, scale, tensors


def _rows_of(model: Decoder, projections: Sequence[str]) -> dict[str, slice]:
    """Returns the rows of a module's output that each projection has."""
    result, start = dict[str, slice](), 0
    for name in projections:
        result[name] = slice(start, start + model.projections()[name].out_features)
        start = result[name].stop
    return result


def groups_of(chosen: Iterable[str], among: Sequence[str]) -> list[str]:
    """Returns the shortest names that select exactly these modules."""
    # The last part of a name where the modules of all layers are chosen, else the whole name
    chosen, result = set(chosen), dict[str, None]()
    for name in among:
        if name in chosen:
            last = name.rpartition(".")[2]
            result[last if all(one in chosen for one in among if one.rpartition(".")[2] == last) else name] = None
    return list(result)


def compressed(values: Mapping[str, Value], among: Sequence[str]) -> tuple[Value, dict[str, Value]]:
    """Returns the most frequent value, and the others by the shortest names of their modules."""
    common = Counter(values.values()).most_common(1)[0][0]
    others = dict[str, Value]()
    for value in dict.fromkeys(values.values()):
        if value != common:
            others |= dict.fromkeys(groups_of([name for name in values if values[name] == value], among), value)
    return common, others


def _checked_settings(path: Path) -> dict[str, Any]:
    """Read the settings of an adapter config. Raises `ModelError` naming one that the decoder cannot follow."""
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type: {settings.get('peft_type')!r} cannot be loaded; LORA can")
    if settings.get("init_lora_weights") not in PLAIN_INITS:
        raise ModelError(
            f"{path}: init_lora_weights: {settings['init_lora_weights']!r} changes the weights of the base; convert "
            "the adapter to a plain LoRA first"
        )
    # An unknown setting is refused unless it is off: a newer PEFT's feature must not be dropped silently
    for name, value in settings.items():
        if name not in (*READ, *WITHOUT_EFFECT, "init_lora_weights") and value not in (None, False, "none", {}, []):
            raise ModelError(f"{path}: {name}: {value!r} cannot be loaded; use an adapter without it")
    result = {**DEFAULTS, **{name: value for name, value in settings.items() if value is not None}}
    for name, default in DEFAULTS.items():
        _check_kind(f"{path}: {name}", result[name], default)
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in result[name].items():
            _check_kind(f"{path}: {name}.{pattern}", value, DEFAULTS["r" if name == "rank_pattern" else "lora_alpha"])
            _check_pattern(f"{path}: {name}", pattern)
    targets: Any = result.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        _check_pattern(f"{path}: target_modules", targets)
    elif not isinstance(targets, str | list | None) or not all(
        isinstance(one, str) for one in cast(Any, targets or ())
    ):
        raise ModelError(f"{path}: target_modules: is neither a text nor a list of texts; copy the folder again")
    return result


def _check_kind(place: str, value: Any, default: Any) -> None:
    """Raise `ModelError` for a value without the type of a default; an int passes for a float."""
    is_right = isinstance(value, int | float) if isinstance(default, float) else isinstance(value, type(default))
    # Compared separately, because a bool is an int
    if not is_right or isinstance(value, bool) != isinstance(default, bool):
        raise ModelError(f"{place}: {value!r} has the wrong type; copy the folder again")


def _check_pattern(place: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{place}: {pattern!r} is not a regular expression ({error}); copy the folder again") from None


def _by_module(
    folder: Path, stored: Mapping[str, Tensor], modules: Mapping[str, AdaptedModule]
) -> dict[str, dict[str, Tensor]]:
    """Group the tensors by module, under this project's names. Raises `ModelError` for unknown ones."""
    result, unknown = dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in stored.items():
        own = next((own for own, theirs in PEFT_NAMES.items() if name.endswith(f".{theirs}")), "")
        module = name.removeprefix(PREFIX).removesuffix(f".{PEFT_NAMES.get(own, '')}")
        if own and module in modules and name.startswith(PREFIX):
            result.setdefault(module, {})[own] = tensor
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ModelError(
            f"{folder / TENSORS}: {', '.join(unknown[:3])}{more}: the model lacks a projection of this name; load the "
            "model that the adapter belongs to"
        )
    return result


def _check_targets(path: Path, settings: Mapping[str, Any], modules: Sequence[str], *, found: set[str]) -> None:
    """Raise `ModelError` if modules that the config names lack tensors."""
    targets = settings.get("target_modules")
    if targets is None or settings.get("exclude_modules") or settings.get("layers_to_transform") is not None:
        return
    if isinstance(targets, str):
        wanted = set(modules) if targets == "all-linear" else {one for one in modules if re.fullmatch(targets, one)}
    else:
        endings = tuple(f".{target}" for target in cast(Sequence[str], targets))
        wanted = {one for one in modules if f".{one}".endswith(endings)}
    if missing := sorted(wanted - found):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{path.with_name(TENSORS)}: lacks tensors for {', '.join(missing[:3])}{more}; copy it again")
