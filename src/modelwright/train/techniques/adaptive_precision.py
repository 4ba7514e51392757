"""Adaptive precision in a run: looks at gradients and moments and changes the formats of the model.

Comes after the finite check, which all ranks have agreed upon. What a rank sees of its pieces is added up over all
ranks, so that every rank decides alike. Everything that a decision rests on is state, but for the speeds of formats,
which are measured once and kept in the stage's folder. Each change is a line in `formats.jsonl`.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import writing
from modelwright.core.resources import hardware, peak_resident_bytes
from modelwright.model.config import ModelConfig
from modelwright.ops.formats import Format
from modelwright.ops.pieces import local
from modelwright.parallel.mesh import Mesh, World
from modelwright.precision.adaptive import ROOMY, Switcher, controller_of, scheduled
from modelwright.precision.adaptive_config import AdaptiveConfig
from modelwright.precision.hardware import Shape, measure_speeds
from modelwright.precision.indicators import (
    EXPECTING,
    Level,
    Momentum,
    Observer,
    Sample,
    Signs,
    Sums,
    error_of,
    kept_noise,
    loss_excess,
    outlier_share,
    relative_rise,
    sum_of_squares,
    trend,
    variation,
)
from modelwright.precision.loss_scale import LossScaler
from modelwright.precision.model import ModelFormats, kind_of, names_of_projections, part_of
from modelwright.precision.policy import Kind
from modelwright.train.objective import Batch, Objective
from modelwright.train.runner import Executor
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update

TRIALS = 2
"""Sensitivities that are tried anew at each decision; what has none is tried before a part changes to it."""
TRIAL_TOKENS = 512
"""Of each rank, in whole rows: what a trial tells is a difference on the same tokens, which a few show."""
MACHINE, CHANGES = "formats.json", "formats.jsonl"
"""Files of a stage: what was measured of formats, and how they changed."""
Pair = tuple[str, Format]


@dataclass(frozen=True)
class Machine:
    """What was measured once, when the run began: seconds of a kind of part in a format, and the share of the
    machine's memory that weights, gradients, moments and what was there before take: what is in use later is more."""

    seconds: Mapping[tuple[Kind, Format], float]
    memory_pressure: float

    def worthwhile(
        self, config: AdaptiveConfig, widest: Set[Format], smaller: Collection[Format]
    ) -> tuple[Format, ...]:
        """The candidates that are fast enough here for a part in a format of `widest` to change to them. To look at any
        other costs time in every period, and gains none: neither rules nor a bandit are offered it.

        smaller: the formats that take fewer bytes, where memory is short; they are worth while however slow they are.
        """
        gain = config.min_gain if not smaller and widest == {"fp32"} else 1.0
        kinds: set[Kind] = {kind for kind, _ in self.seconds}
        return tuple(
            chosen
            for chosen in config.candidates
            if chosen in smaller
            or any(self.seconds[kind, "fp32"] >= gain * self.seconds[kind, chosen] for kind in kinds)
        )


@dataclass
class Seen:
    """What the present period has brought so far. overflows: steps that were not finite while a part was in FP16."""

    losses: list[float] = field(default_factory=list)
    run_norms: list[float] = field(default_factory=list)
    norms: dict[str, list[float]] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class AdaptivePrecision:
    """parts: of the whole model, on all ranks alike; names and num_holders: of this rank's tensors.

    trial: the loss of some rows of the present batch with the formats as they are, over all ranks; scale: of losses.
    last_rate: the learning rate of the step before; tried: losses with one part in a format, of the present decision;
    levels: of the last periods' losses, since a jump; is_due: a decision waits for a step that is not skipped, since
    the last step of its period was.
    """

    config: AdaptiveConfig
    formats: ModelFormats
    names: Mapping[Tensor, str]
    num_holders: Sequence[int]
    optimizer: Optimizer
    world: World
    machine: "Machine"
    trial: Callable[[], float]
    scale: Callable[[], float]
    path: Path
    parts: list[str] = field(init=False)
    switcher: Switcher = field(init=False)
    observer: Observer = field(init=False)
    seen: Seen = field(default_factory=Seen)
    sensitivity: dict[Pair, float] = field(default_factory=dict)
    next_trial: int = 0
    tried: dict[Pair, float] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    is_due: bool = False
    last_rate: float = 0.0
    memory_pressure: float = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        num_layers = self.formats.model.config.num_layers
        self.parts = list(dict.fromkeys(map(part_of, names_of_projections(num_layers))))
        widest: dict[str, Format] = {part: self.formats.config.format_of(kind_of(part)) for part in self.parts}
        self.memory_pressure = self.machine.memory_pressure
        self.switcher = Switcher(self.config, widest, controller_of(self.config), self._probe)
        self._offer()
        self.observer = Observer(self.candidates, self.formats.config)

    @property
    def looks(self) -> bool:
        """Whether there is anything to choose, so that indicators are worth their time."""
        return self.config.looks and len(self.candidates) > 1

    @property
    def candidates(self) -> list[Format]:
        present = self.switcher.formats.values()
        return list(dict.fromkeys(["fp32", *self.switcher.widest.values(), *present, *self.switcher.offered]))

    def _offer(self) -> None:
        """To the switcher what is worth while as memory is now."""
        if not self.config.looks:
            return
        widest, is_short = set(self.switcher.widest.values()), self.memory_pressure >= ROOMY
        largest = max(map(self._size, widest))
        candidates = self.config.candidates if is_short else ()
        smaller: list[Format] = [chosen for chosen in candidates if self._size(chosen) < largest]
        self.switcher.offered = self.machine.worthwhile(self.config, widest, smaller)

    def _size(self, chosen: Format) -> float:
        """Bytes of what a format's products give, which is kept for backward, over those of FP32."""
        return self.formats.config.result_of[chosen].itemsize / torch.float32.itemsize

    def _see_memory(self) -> None:
        """Of all ranks. Memory that was short stays so, or formats would be left for the relief that they brought."""
        present = memory_share(self.world.device)
        self.memory_pressure = max(self.memory_pressure, *self.world.maxima(present))

    def begin_step(self, step: int) -> None:
        """Before the forward pass of update `step` (from 0): look on while the period's last steps are made."""
        self.last_rate = self.optimizer.param_groups[0]["lr"]
        if step == 0:
            self._forget_after(0)
        if self.looks and self._measures(step):
            self.formats.watch(self.observer.watched)

    def on_gradients(self, update: Update) -> None:
        step = update.step
        if self.looks and self._measures(step):
            self.formats.watch(None)
        if self.config.kind == "schedule":
            self.switcher.follow(step + 1, scheduled(self.config, step + 1, self.parts, self.switcher.widest))
        elif self.looks:
            self._look(update)
        elif self.config.looks and (step + 1) % self.config.every == 0:
            self._see_memory()
            self._offer()
        self.step = step + 1
        self._bring(update)

    def _own_of(self, observed: Mapping[str, Sequence[Any]]) -> dict[tuple[str, str, Format], tuple[float, int]]:
        """This rank's observations; those of another number of ranks fall to the first, for only their sum counts."""
        if len(observed) == self.world.size:
            own = observed[str(self.world.rank)]
        else:
            own = [seen for rank in sorted(observed) for seen in observed[rank]] if self.world.is_first else []
        errors: dict[tuple[str, str, Format], tuple[float, int]] = {}
        for part, what, chosen, lost, number in own:
            total, count = errors.get((part, what, chosen), (0.0, 0))
            errors[part, what, chosen] = total + lost, count + int(number)
        return errors

    def _look(self, update: Update) -> None:
        """Formats that a jump has just changed are not judged by what was seen of others: the decision falls out."""
        self.is_due = self.is_due or (update.step + 1) % self.config.every == 0
        if update.is_empty:
            return  # its loss of 0 tells nothing
        self._count_overflow(update)
        jumped = self.switcher.see_loss(update.step + 1, update.loss)
        measures = self._measures(update.step)
        if jumped:
            self.levels = []
        else:
            self.seen.losses.append(update.loss)
            self.seen.run_norms.append(update.grad_norm)
            if update.skipped:
                return
            sums = self._sums(update.step, whole=self.is_due) if measures else {}
            for part, found in sums.items():
                self.seen.norms.setdefault(part, []).append(found.gradient**0.5)
            if self.is_due:
                self._decide(update.step + 1, sums)
        if self.is_due:
            self._offer()  # from the next period on, which looks at what is new
            self.seen, self.observer, self.is_due = Seen(), Observer(self.candidates, self.formats.config), False

    def _count_overflow(self, update: Update) -> None:
        """Of the formats in force at this step; what was skipped as a spike of the loss overflowed nowhere."""
        if math.isfinite(update.loss) and math.isfinite(update.grad_norm):
            return
        for part, chosen in self.switcher.formats.items():
            if chosen == "fp16":
                self.seen.overflows[part] = self.seen.overflows.get(part, 0) + 1

    def _decide(self, step: int, sums: Mapping[str, Sums]) -> None:
        self._see_memory()
        self._try()
        self.switcher.decide(step, self._signs(sums), self._loss_excess())

    def _loss_excess(self) -> float:
        """Of the period that ends, which then belongs to the past."""
        now = Level.of(self.seen.losses)
        if now is None:
            return 0.0
        excess = loss_excess(self.levels, now)
        self.levels = [*self.levels, now][-EXPECTING:]
        return excess

    def _bring(self, update: Update) -> None:
        """Let the model follow, and tell."""
        held: dict[str, Format] = {
            part: chosen for part, chosen in self.switcher.formats.items() if part in self.formats.formats
        }
        if held != self.formats.formats:
            self.formats.change(held)
        changes = self.switcher.take_changes()
        if changes and self.world.is_first:
            with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(change) + "\n" for change in changes)
        narrow = sum(chosen != "fp32" for chosen in self.switcher.formats.values())
        update.metrics["narrow_share"] = narrow / max(1, len(self.parts))

    def _measures(self, step: int) -> bool:
        return self.is_due or step % self.config.every >= self.config.every - self.config.window

    def _sums(self, step: int, *, whole: bool) -> dict[str, Sums]:
        """Of every part after `step` updates, over all ranks; a tensor that several hold counts once. Only the
        gradient's, unless `whole`: a decision alone needs the others."""
        own, scale = dict.fromkeys(self.parts, Sums()), self.scale()
        groups = {
            parameter: {**group, "lr": self.last_rate}
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        for (parameter, name), holders in zip(self.names.items(), self.num_holders, strict=True):
            part = _part_of_weight(name)
            if part in own and parameter.grad is not None:
                gradient, state = local(parameter.grad), self.optimizer.state.get(parameter, {})
                if whole:
                    momentum = momentum_of(state, groups[parameter], step)
                    found = Sums.of(local(parameter.detach()), gradient, momentum, scale=scale)
                else:
                    found = Sums(gradient=sum_of_squares(gradient))
                own[part] = own[part].plus(found, 1.0 / holders)
        flat = self.world.sums([value for sums in own.values() for value in sums.values])
        width = len(Sums().values)
        return {part: Sums(*flat[i * width : (i + 1) * width]) for i, part in enumerate(self.parts)}

    def _signs(self, sums: Mapping[str, Sums]) -> dict[str, Signs]:
        errors, now = self._errors(), trend(self.seen.losses)
        outliers = outlier_share(self.seen.run_norms)
        return {
            part: Signs(
                gradient_noise=sums[part].gradient_noise,
                gradient_variance=variation(self.seen.norms[part]),
                update_to_weight=sums[part].update_to_weight,
                overflow_share=sums[part].overflows / max(1.0, sums[part].elements),
                underflow_share=sums[part].underflows / max(1.0, sums[part].elements),
                skipped_share=self.seen.overflows.get(part, 0) / len(self.seen.losses),
                weight_error={chosen: errors[part, "weight", chosen] for chosen in self.candidates},
                input_error={chosen: errors[part, "input", chosen] for chosen in self.candidates},
                gradient_error={chosen: errors[part, "gradient", chosen] for chosen in self.candidates},
                sensitivity={one: rise for (name, one), rise in self.sensitivity.items() if name == part},
                loss_trend=now,
                norm_outliers=outliers,
                speed={chosen: self._relative_seconds(part, chosen) for chosen in self.candidates},
                size={chosen: self._size(chosen) for chosen in self.candidates},
                memory_pressure=self.memory_pressure,
            )
            for part in self.parts
        }

    def _relative_seconds(self, part: str, chosen: Format) -> float:
        kind = kind_of(part)
        return self.machine.seconds[kind, chosen] / self.machine.seconds[kind, "fp32"]

    def _errors(self) -> dict[tuple[str, str, Format], float]:
        """Means over ranks of what each format loses of weights, inputs and gradients."""
        keys: list[tuple[str, str, Format]] = [
            (part, what, chosen)
            for part in self.parts
            for what in ("weight", "input", "gradient")
            for chosen in self.candidates
        ]
        weights = self._weight_errors()
        own = [weights.get((part, chosen), (0.0, 0)) if what == "weight" else self.observer.take(part, what, chosen)
               for part, what, chosen in keys]  # fmt: skip
        totals = self.world.sums([float(value) for pair in own for value in pair])
        return {key: totals[2 * i] / max(1.0, totals[2 * i + 1]) for i, key in enumerate(keys)}

    def _weight_errors(self) -> dict[Pair, tuple[float, int]]:
        found: dict[Pair, tuple[float, int]] = {}
        for parameter, name in self.names.items():
            weight, part = local(parameter.detach()), _part_of_weight(name)
            if weight.dim() != 2 or not weight.numel() or part not in self.parts:
                continue
            sample = Sample.of(weight)
            for chosen in self.candidates:
                total, count = found.get((part, chosen), (0.0, 0))
                lost = error_of(sample, chosen, "weight", self.formats.config)
                found[part, chosen] = total + lost, count + 1
        return found

    def _try(self) -> None:
        """A few pairs in turn, all formats of a part one after the other: the model that they are tried on changes."""
        pairs: list[Pair] = [(part, chosen) for part in self.parts for chosen in self.candidates if chosen != "fp32"]
        self.tried = dict.fromkeys(self.switcher.formats.items(), self.trial())
        for _ in range(min(TRIALS, len(pairs))):
            self._probe(*pairs[self.next_trial % len(pairs)])
            self.next_trial += 1

    def _probe(self, part: str, chosen: Format) -> float | None:
        """How much the loss rises when one part computes in a narrower format instead of FP32, while the others stay as
        they are; None where no row has a label, which tells nothing."""
        exact, narrow = (self._tried(part, name) for name in ("fp32", chosen))
        if exact == 0.0:
            return None
        self.sensitivity[part, chosen] = relative_rise(exact, narrow)
        return self.sensitivity[part, chosen]

    def _tried(self, part: str, chosen: Format) -> float:
        """The loss with this part in this format."""
        if (part, chosen) not in self.tried:
            is_here, present = part in self.formats.formats, dict(self.formats.formats)
            if is_here:
                self.formats.change({part: chosen})
            self.tried[part, chosen] = self.trial()
            if is_here:
                self.formats.change(present)
        return self.tried[part, chosen]

    def _forget_after(self, step: int) -> None:
        """Leave out changes that a run which was cut off made after its last checkpoint: they come again."""
        if not self.world.is_first or not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_atomic(self.path, "".join(f"{line}\n" for line in kept))

    def state_dict(self) -> dict[str, Any]:
        return {
            "switcher": self.switcher.state_dict(),
            "losses": list(self.seen.losses),
            "run_norms": list(self.seen.run_norms),
            "norms": {part: list(norms) for part, norms in self.seen.norms.items()},
            "overflows": dict(self.seen.overflows),
            "observed": {str(self.world.rank): [[*key, *value] for key, value in self.observer.errors.items()]},
            "sensitivity": [[*key, value] for key, value in self.sensitivity.items()],
            "next_trial": self.next_trial,
            "levels": [list(vars(level).values()) for level in self.levels],
            "is_due": self.is_due,
            "memory_pressure": self.memory_pressure,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.switcher.load_state_dict(state["switcher"])
        self.memory_pressure = float(state["memory_pressure"])
        self._offer()
        norms = {part: list(values) for part, values in state["norms"].items()}
        self.seen = Seen(list(state["losses"]), list(state["run_norms"]), norms, dict(state["overflows"]))
        self.observer = Observer(self.candidates, self.formats.config, self._own_of(state["observed"]))
        self.sensitivity = {(part, chosen): float(value) for part, chosen, value in state["sensitivity"]}
        self.next_trial = int(state["next_trial"])
        self.levels = [Level(*level) for level in state["levels"]]
        self.is_due, self.step = bool(state["is_due"]), int(state["step"])
        self._forget_after(self.step)
        held = self.formats.formats
        self.formats.change({part: chosen for part, chosen in self.switcher.formats.items() if part in held})


@dataclass(kw_only=True)
class TrialLoss:
    """The loss of each rank's first rows of the present batch, with weights and formats as they are now.

    batch, weights: the present batch of this rank and the normalizers of its loss terms.
    """

    objective: Objective
    executor: Executor
    mesh: Mesh
    batch: Batch | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self) -> float:
        assert self.batch is not None
        batch, model = self.batch, self.executor.model
        group_tokens = batch.group_size * batch.input_ids_BT.shape[1]
        batch = batch.take(torch.arange(min(batch.num_groups, -(-TRIAL_TOKENS // group_tokens))))
        scale = {name: 1.0 / weight if weight > 0 else 0.0 for name, weight in self.weights.items()}
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)

        def loss_of(output: Tensor, microbatch: Batch) -> Tensor:
            terms = self.objective.losses(output, microbatch, model)
            loss = torch.stack([terms[name] * scale[name] for name in scale]).sum()
            total.add_(loss * self.mesh.tensor.is_first)
            return loss

        self.executor.evaluate([batch.to(self.mesh.world.device)], loss_of)
        return self.mesh.world.sums([float(total)])[0]


def adaptive_precision(
    config: AdaptiveConfig, run: Runtime, *, objective: Objective, scaler: LossScaler, num_rows: int
) -> Technique | None:
    """num_rows: tokens of one microbatch on one rank. Acts on batches before the learning rate is set."""
    if config.kind == "none":
        return None
    mesh, formats = run.mesh, run.formats
    trial = TrialLoss(objective=objective, executor=run.executor, mesh=mesh)
    adaptive = AdaptivePrecision(
        config=config,
        formats=formats,
        names=run.replica.names,
        num_holders=run.replica.num_holders,
        optimizer=run.replica.optimizer,
        world=mesh.world,
        machine=machine_for(run.folder, formats, run.world, num_rows=num_rows, tensor=mesh.tensor.size),
        trial=trial,
        scale=lambda: scaler.value,
        path=run.folder / CHANGES,
    )

    def on_batch(step: int, batch: Batch) -> Batch:
        adaptive.begin_step(step)
        trial.batch = batch
        return batch

    def on_gradients(update: Update) -> None:
        trial.weights = update.weights
        adaptive.on_gradients(update)

    return Technique(name="adaptive_precision", on_batch=on_batch, on_gradients=on_gradients, state=adaptive)


def momentum_of(state: Mapping[str, Any], group: Mapping[str, Any], num_updates: int) -> Momentum | None:
    """Of a parameter that AdamW, Lion or Muon changes, None before its first update.

    Lion moves every element by the rate, Muon by 0.2 of it, root mean square.
    """
    if "momentum_buffer" in state:
        average = local(state["momentum_buffer"])
        return Momentum(average, kept_noise(group["momentum"], num_updates), average.numel() * (0.2 * group["lr"]) ** 2)
    if "exp_avg" not in state or not num_updates:
        return None
    average, betas = local(state["exp_avg"]), group["betas"]
    if "exp_avg_sq" not in state:
        return Momentum(average, kept_noise(betas[1], num_updates), average.numel() * group["lr"] ** 2)
    num_updates = max(1, int(state["step"]))
    mean, square = average / (1 - betas[0] ** num_updates), local(state["exp_avg_sq"]) / (1 - betas[1] ** num_updates)
    move = float((mean / (square.sqrt() + group["eps"])).square().sum())
    return Momentum(average, kept_noise(betas[0], num_updates), move * group["lr"] ** 2)


def _step_of(line: str) -> float:
    """Of a change; a line that was cut off comes after all others."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def _part_of_weight(name: str) -> str:
    """`blocks.3.ffn.up_proj.weight` -> `blocks.3.ffn`."""
    return part_of(name.removesuffix(".weight"))


def shapes_of(model: ModelConfig, tensor: int) -> dict[Kind, list[Shape]]:
    """Of the projections that one of `tensor` ranks computes, by kind of part."""
    width, heads = model.model_dim, model.num_heads * model.head_dim // tensor
    pairs, wide = max(1, model.num_kv_heads // tensor) * model.head_dim, model.ffn_dim // tensor
    return {
        "attention": [(heads, width), (pairs, width), (pairs, width), (width, heads)],
        "ffn": [(wide, width), (wide, width), (width, wide)],
    }


def machine_for(folder: Path, formats: ModelFormats, world: World, *, num_rows: int, tensor: int) -> Machine:
    """As measured when the run began, and kept in the folder: of all ranks the slowest and the fullest. Nothing is
    measured for a schedule."""
    config = formats.config
    if not config.adaptive.looks:
        return Machine({}, 0.0)
    candidates: list[Format] = list(
        dict.fromkeys(["fp32", *map(config.format_of, ("attention", "ffn")), *config.adaptive.candidates])
    )
    shapes = shapes_of(formats.model.config, tensor)
    keys: list[tuple[Kind, Format]] = [(kind, chosen) for kind in shapes for chosen in candidates]
    path, names = folder / MACHINE, [*("/".join(key) for key in keys), "memory"]
    kept = _kept(path, names) if world.is_first else {}
    found = world.maxima(*(kept.get(name, 0.0) for name in names))
    if min(found) <= 0:
        with torch.random.fork_rng():
            weights = sum(local(parameter.detach()).nbytes for parameter in formats.model.parameters())
            own = measure_speeds(formats, shapes, candidates, num_rows=num_rows, device=world.device)
        found = world.maxima(*(own[key] for key in keys), memory_share(world.device, 3 * weights))
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)  # it is the first thing that a run writes
            write_atomic(path, json.dumps(dict(zip(names, found, strict=True)), indent=2) + "\n")
    return Machine(dict(zip(keys, found[:-1], strict=True)), found[-1])


def _kept(path: Path, names: Sequence[str]) -> dict[str, float]:
    """What an earlier start measured; nothing where the file is missing or damaged, so that it is measured anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(found[name]) for name in names}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def memory_share(device: torch.device, more_bytes: int = 0) -> float:
    """The most of a device's memory that this process has had in use so far, and what others have now; more_bytes: that
    will be."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_reserved(device)
        return min(1.0, (total - free + own + more_bytes) / total)
    return min(1.0, (peak_resident_bytes() + more_bytes) / hardware()["memory_bytes"])
