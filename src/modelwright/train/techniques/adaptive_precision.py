"""Adaptive precision in a run: observes gradients and moments and changes the formats of the model.

It acts after the finite check, on which all ranks have agreed. A rank's observations of its shards are summed over all
ranks, so that every rank decides alike. Everything that a decision depends on is state, except for the speeds of
formats, which are measured once and stored in the stage's folder. Each change is a line in `formats.jsonl`. The
sensitivity of the loss to a narrower format in one part of the model is measured by trial forward passes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.artifacts import write_atomic
from modelwright.core.records import EventLog
from modelwright.core.resources import hardware, peak_resident_bytes
from modelwright.ops.dtensor import local
from modelwright.ops.lowp_linear import Format
from modelwright.parallel.mesh import Mesh, World
from modelwright.train.objective import Batch, Executor, Objective
from modelwright.train.precision import controllers, indicators
from modelwright.train.precision.apply import ModelPrecision, kind_of, names_of_projections, part_of
from modelwright.train.precision.policy import AdaptiveConfig, Kind
from modelwright.train.technique import Runtime, Technique, Update

TRIALS = 2
"""Pairs that are tried again at each decision; a pair that was never tried is tried before a part changes to it."""
Pair = tuple[str, Format]


@dataclass(kw_only=True)
class SensitivityTrials:
    """Tries parts in formats and records the relative rise of the loss for each pair. Every rank makes the same trials,
    including parts that it does not hold.
    """

    formats: ModelPrecision
    loss: Callable[[], float]
    """The loss over all ranks of some rows of the present batch, with the formats in force."""
    sensitivity: dict[Pair, float] = field(default_factory=dict[Pair, float])
    """Relative rise of the loss with the part in the format instead of FP32, when last tried."""
    next_trial: int = 0
    """Number of trials so far, which go round the pairs."""
    losses: dict[Pair, float] = field(default_factory=dict[Pair, float])
    """Losses at the present decision with one part in a format and the others in their present ones."""

    def begin(self, present: Sequence[Pair], pairs: Sequence[Pair]) -> None:
        """Forget the losses of earlier weights, and try the next few `pairs`. present: the format of each part. pairs:
        all candidates, the formats of one part in a row, because the model changes between two rounds of trials.
        """
        self.losses = dict.fromkeys(present, self.loss())
        for _ in range(min(TRIALS, len(pairs))):
            self.rise(*pairs[self.next_trial % len(pairs)])
            self.next_trial += 1

    def rise(self, part: str, chosen: Format) -> float | None:
        """Relative rise of the loss with the part in this format instead of FP32, the others in their present formats.
        None if no row has a label.
        """
        formats: tuple[Format, Format] = ("fp32", chosen)
        for one in formats:
            if (part, one) in self.losses:
                continue
            # A rank that does not hold the part computes the loss all the same: the evaluation is collective.
            is_here, present = part in self.formats.formats, dict(self.formats.formats)
            if is_here:
                self.formats.change({part: one})
            self.losses[part, one] = self.loss()
            if is_here:
                self.formats.change(present)
        exact, narrow = self.losses[part, "fp32"], self.losses[part, chosen]
        if exact == 0.0:
            return None
        self.sensitivity[part, chosen] = indicators.relative_rise(exact, narrow)
        return self.sensitivity[part, chosen]

    def state_dict(self) -> dict[str, Any]:
        return {
            "sensitivity": [[*pair, rise] for pair, rise in self.sensitivity.items()],
            "next_trial": self.next_trial,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sensitivity = {(part, chosen): float(rise) for part, chosen, rise in state["sensitivity"]}
        self.next_trial = int(state["next_trial"])


TRIAL_TOKENS = 512
"""Tokens per rank, in whole rows, of a trial forward pass. A few suffice: trials compare losses on the same tokens."""
MACHINE, CHANGES = "formats.json", "formats.jsonl"
"""Files of a stage: the measured speeds of formats, and the changes of formats."""
MAX_CHANGES = 10_000
"""Changes that are recorded: enough for all parts of a model with 80 layers to change 60 times."""


@dataclass(kw_only=True)
class AdaptivePrecision:
    """Observes the steps of a run, lets the switcher decide after each period, and applies and records its changes.

    The model is observed only in the last steps of each period of `config.decide_every_steps` steps, and not at all
    while no format but the present one is worthwhile.
    """

    config: AdaptiveConfig
    formats: ModelPrecision
    names: InitVar[Mapping[Tensor, str]]
    """This rank's parameters."""
    num_holders: InitVar[Sequence[int]]
    """Number of ranks that hold each parameter, in the order of `names`."""
    optimizer: Optimizer
    world: World
    machine: controllers.DtypeTimings
    trial: InitVar[Callable[[], float]]
    """The loss over all ranks of some rows of the present batch, with the formats in force."""
    scale: Callable[[], float]
    """Returns the present loss scale."""
    path: Path
    """File to which each change is added as a line."""

    parts: list[str] = field(init=False)
    """Names of the whole model's submodules, the same on all ranks."""
    statistics: indicators.PartStatistics = field(init=False)
    trials: SensitivityTrials = field(init=False)
    switcher: controllers.PrecisionSwitcher = field(init=False)
    period: indicators.Period = field(init=False)
    log: EventLog = field(init=False)
    levels: list[indicators.LossLevel] = field(default_factory=list[indicators.LossLevel])
    """Loss levels of the last periods since a jump."""
    memory_pressure: float = field(init=False)
    is_due: bool = False
    """True while a decision waits for a step that is not skipped, because the last step of its period was."""
    last_rate: float = 0.0
    """Learning rate of the optimizer when the step began."""

    def __post_init__(
        self, names: Mapping[Tensor, str], num_holders: Sequence[int], trial: Callable[[], float]
    ) -> None:
        self.parts = list(dict.fromkeys(map(part_of, names_of_projections(self.formats.model.config))))
        self.statistics = indicators.PartStatistics(
            parts=self.parts,
            config=self.formats.config,
            names=names,
            num_holders=num_holders,
            sum_over_ranks=self.world.sums,
        )
        self.trials = SensitivityTrials(formats=self.formats, loss=trial)
        widest: dict[str, Format] = {part: self.formats.config.format_of(kind_of(part)) for part in self.parts}
        controller = controllers.Bandit(self.config) if self.config.kind == "bandit" else controllers.Rules(self.config)
        self.switcher = controllers.PrecisionSwitcher(self.config, widest, controller, self.trials.rise)
        self.memory_pressure = self.machine.memory_pressure
        self._offer()
        self.period = indicators.Period(indicators.Observer(self.candidates, self.formats.config, {}))
        self.log = EventLog(self.path, is_first=self.world.is_first, max_events=MAX_CHANGES)

    @property
    def looks(self) -> bool:
        """True if there is more than one format to choose from; otherwise indicators are not measured."""
        return self.config.looks and len(self.candidates) > 1

    @property
    def candidates(self) -> list[Format]:
        present = self.switcher.formats.values()
        return list(dict.fromkeys(["fp32", *self.switcher.widest.values(), *present, *self.switcher.offered]))

    def begin_step(self, step: int) -> None:
        """Call before the forward pass of update `step` (from 0): start observing in the last steps of a period."""
        self.last_rate = self.optimizer.param_groups[0]["lr"]
        if self.looks and self._is_measured(step):
            self.formats.watch(self.period.observer.watched)

    def on_gradients(self, update: Update) -> None:
        """Once per step, with the gradients of all microbatches: observe, decide when due, apply, record."""
        step = update.step
        if self.looks and self._is_measured(step):
            self.formats.watch(None)
        if self.config.kind == "schedule":
            self.switcher.follow(
                step + 1, controllers.scheduled(self.config, step + 1, self.parts, self.switcher.widest)
            )
        elif self.looks:
            self._look(update)
        elif self.config.looks and (step + 1) % self.config.decide_every_steps == 0:
            self._see_memory()
            self._offer()
        self._apply()
        for change in self.switcher.take_changes():
            self.log.append(**change)
        narrow = sum(chosen != "fp32" for chosen in self.switcher.formats.values())
        update.metrics["low_precision_fraction"] = narrow / max(1, len(self.parts))

    def _is_measured(self, step: int) -> bool:
        return (
            self.is_due
            or step % self.config.decide_every_steps >= self.config.decide_every_steps - self.config.measure_steps
        )

    def _look(self, update: Update) -> None:
        """Observe a step, and decide at the end of a period. A jump of the loss changes formats at once; a decision
        that is due is then skipped, because observations of the other formats say nothing about the new ones.
        """
        self.is_due = self.is_due or (update.step + 1) % self.config.decide_every_steps == 0
        if update.is_empty:
            return  # its loss is 0 whatever the formats
        if not (math.isfinite(update.loss) and math.isfinite(update.grad_norm)):  # not if skipped as a spike
            # The step counts against the parts that were in FP16.
            for part, chosen in self.switcher.formats.items():
                if chosen == "fp16":
                    self.period.overflows[part] = self.period.overflows.get(part, 0) + 1
        is_measured = self._is_measured(update.step)
        if self.switcher.see_loss(update.step + 1, update.loss):
            self.levels = []
        else:
            self.period.losses.append(update.loss)
            self.period.run_norms.append(update.grad_norm)
            if update.skipped:
                return
            # Only a decision needs more than the gradients' statistics.
            sums: dict[str, indicators.GradientStats] = {}
            if is_measured and not self.is_due:
                sums = self.statistics.sums(
                    lambda parameter, gradient: indicators.GradientStats(gradient=indicators.sum_of_squares(gradient))
                )
            elif is_measured:
                state, scale = self.optimizer.state, self.scale()
                groups = {
                    parameter: {**group, "lr": self.last_rate}
                    for group in self.optimizer.param_groups
                    for parameter in group["params"]
                }
                sums = self.statistics.sums(
                    lambda parameter, gradient: indicators.GradientStats.of(
                        local(parameter.detach()),
                        gradient,
                        momentum_of(state.get(parameter, {}), groups[parameter], update.step),
                        scale=scale,
                    )
                )
            for part, total in sums.items():
                self.period.norms.setdefault(part, []).append(total.gradient**0.5)
            if self.is_due:
                self._see_memory()
                candidates: list[Format] = [chosen for chosen in self.candidates if chosen != "fp32"]
                pairs: list[Pair] = [(part, chosen) for part in self.parts for chosen in candidates]
                self.trials.begin(list(self.switcher.formats.items()), pairs)
                signs = self._indicators(sums)
                # The excess of the ending period's loss over the prediction from earlier ones, which it then joins.
                excess, level = 0.0, indicators.LossLevel.of(self.period.losses)
                if level is not None:
                    excess = indicators.loss_excess(self.levels, level)
                    self.levels = [*self.levels, level][-indicators.EXPECTING :]
                self.switcher.decide(update.step + 1, signs, excess)
        if self.is_due:
            self._offer()  # new formats are observed from the next period on
            self.period = indicators.Period(indicators.Observer(self.candidates, self.formats.config, {}))
            self.is_due = False

    def _indicators(self, sums: Mapping[str, indicators.GradientStats]) -> dict[str, indicators.Indicators]:
        config, candidates, period = self.formats.config, self.candidates, self.period
        errors = self.statistics.errors(period.observer, candidates)
        loss_trend, norm_outliers = indicators.trend(period.losses), indicators.outlier_share(period.run_norms)
        seconds = self.machine.seconds
        fp32_s = {part: seconds[kind_of(part), "fp32"] for part in self.parts}
        return {
            part: indicators.Indicators(
                gradient_noise=sums[part].gradient_noise,
                gradient_variance=indicators.variation(period.norms[part]),
                update_to_weight=sums[part].update_to_weight,
                overflow_share=sums[part].overflows / max(1.0, sums[part].elements),
                underflow_share=sums[part].underflows / max(1.0, sums[part].elements),
                skipped_share=period.overflows.get(part, 0) / len(period.losses),
                weight_error={chosen: errors[part, "weight", chosen] for chosen in candidates},
                input_error={chosen: errors[part, "input", chosen] for chosen in candidates},
                gradient_error={chosen: errors[part, "gradient", chosen] for chosen in candidates},
                sensitivity={chosen: rise for (name, chosen), rise in self.trials.sensitivity.items() if name == part},
                loss_trend=loss_trend,
                norm_outliers=norm_outliers,
                speed={chosen: seconds[kind_of(part), chosen] / fp32_s[part] for chosen in candidates},
                size={chosen: config.relative_bytes(chosen) for chosen in candidates},
                memory_pressure=self.memory_pressure,
            )
            for part in self.parts
        }

    def _see_memory(self) -> None:
        # Never lowered: otherwise a low-precision format would be dropped as soon as it relieved the shortage.
        present = memory_share(self.world.device)
        self.memory_pressure = max(self.memory_pressure, *self.world.maxima(present))

    def _offer(self) -> None:
        """Offer the switcher the formats that are worthwhile at the present memory pressure."""
        if self.config.looks:
            widest = set(self.switcher.widest.values())
            self.switcher.offered = self.machine.worthwhile(self.formats.config, widest, self.memory_pressure)

    def _apply(self) -> None:
        """Change the formats of those parts that this rank holds."""
        held = self.formats.formats
        formats: dict[str, Format] = {part: chosen for part, chosen in self.switcher.formats.items() if part in held}
        if formats != held:
            self.formats.change(formats)

    def state_dict(self) -> dict[str, Any]:
        observed = [[*key, *value] for key, value in self.period.observer.errors.items()]
        return {
            "switcher": self.switcher.state_dict(),
            **self.period.state_dict(),
            **self.trials.state_dict(),
            **self.log.state_dict(),
            "observed": {str(self.world.rank): observed},
            "levels": [list(vars(level).values()) for level in self.levels],
            "is_due": self.is_due,
            "memory_pressure": self.memory_pressure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.switcher.load_state_dict(state["switcher"])
        self.memory_pressure = float(state["memory_pressure"])
        self._offer()
        # This rank's observations; with another number of ranks all go to the first, because only their sum counts.
        observed: Mapping[str, Sequence[Any]] = state["observed"]
        if len(observed) == self.world.size:
            own = observed[str(self.world.rank)]
        else:
            own = [one for rank in sorted(observed) for one in observed[rank]] if self.world.is_first else []
        errors: indicators.ObservedErrors = {}
        for part, factor, chosen, lost, number in own:
            total, count = errors.get((part, factor, chosen), (0.0, 0))
            errors[part, factor, chosen] = total + lost, count + int(number)
        self.period = indicators.Period(
            indicators.Observer(self.candidates, self.formats.config, errors),
            losses=list(state["losses"]),
            run_norms=list(state["run_norms"]),
            norms={part: list(norms) for part, norms in state["norms"].items()},
            overflows=dict(state["overflows"]),
        )
        self.trials.load_state_dict(state)
        self.levels = [indicators.LossLevel(*level) for level in state["levels"]]
        self.is_due = bool(state["is_due"])
        self.log.load_state_dict(state)
        self._apply()


@dataclass(kw_only=True)
class TrialLoss:
    """Computes the loss of each rank's first rows of the present batch, with the present weights and formats. batch,
    weights: the present batch of this rank and the normalizers of its loss terms.
    """

    objective: Objective
    executor: Executor
    mesh: Mesh
    batch: Batch | None = None
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @torch.no_grad()
    def __call__(self) -> float:
        assert self.batch is not None
        batch, model = self.batch, self.executor.model
        group_tokens = batch.group_size * batch.input_ids_BT.shape[1]
        batch = batch.take(torch.arange(min(batch.num_groups, -(-TRIAL_TOKENS // group_tokens))))
        scale = {name: 1.0 / weight if weight > 0 else 0.0 for name, weight in self.weights.items()}
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)

        def loss_of(output: Tensor, microbatch: Batch) -> Tensor:
            terms = self.objective.losses(output, microbatch, model).losses
            loss = torch.stack([terms[name] * scale[name] for name in scale]).sum()
            total.add_(loss * self.mesh.tensor.is_first)
            return loss

        self.executor.evaluate([batch.to(self.mesh.world.device)], loss_of)
        return self.mesh.world.sums([float(total)])[0]


def adaptive_precision(config: AdaptiveConfig, run: Runtime, *, objective: Objective) -> Technique | None:
    """Returns None if formats do not change."""
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
        machine=machine_for(run.folder, formats, run.world, num_rows=run.microbatch_tokens, tensor=mesh.tensor.size),
        trial=trial,
        scale=lambda: run.scaler.value,
        path=run.folder / CHANGES,
    )

    def on_batch(step: int, batch: Batch) -> Batch:
        adaptive.begin_step(step)
        trial.batch = batch
        return batch

    def on_gradients(update: Update) -> None:
        trial.weights = update.weights
        adaptive.on_gradients(update)

    return Technique(
        name="adaptive_precision", on_batch=on_batch, on_gradients=on_gradients, state=adaptive, needs=frozenset()
    )


def momentum_of(state: Mapping[str, Any], group: Mapping[str, Any], num_updates: int) -> indicators.Momentum | None:
    """Momentum of a parameter that AdamW, Lion or Muon updates; None before its first update."""
    if "momentum_buffer" in state:  # Muon: it moves elements by 0.2 of the rate, root mean square
        average = local(state["momentum_buffer"])
        return indicators.Momentum(
            average, indicators.kept_noise(group["momentum"], num_updates), average.numel() * (0.2 * group["lr"]) ** 2
        )
    if "exp_avg" not in state or not num_updates:
        return None
    average, betas = local(state["exp_avg"]), group["betas"]
    if "exp_avg_sq" not in state:  # Lion: it moves every element by the rate
        return indicators.Momentum(
            average, indicators.kept_noise(betas[1], num_updates), average.numel() * group["lr"] ** 2
        )
    num_updates = max(1, int(state["step"]))
    mean, square = average / (1 - betas[0] ** num_updates), local(state["exp_avg_sq"]) / (1 - betas[1] ** num_updates)
    move = float((mean / (square.sqrt() + group["eps"])).square().sum())
    return indicators.Momentum(average, indicators.kept_noise(betas[0], num_updates), move * group["lr"] ** 2)


def machine_for(
    folder: Path, formats: ModelPrecision, world: World, *, num_rows: int, tensor: int
) -> controllers.DtypeTimings:
    """Returns the times of formats on the slowest rank and the memory share of the fullest one, measured at the start
    of the run and stored in the folder. Nothing is measured for a schedule. tensor: ranks of the tensor axis.
    """
    config, model = formats.config, formats.model.config
    if not config.adaptive.looks:
        return controllers.DtypeTimings({}, 0.0)
    candidates: list[Format] = list(
        dict.fromkeys(["fp32", *map(config.format_of, ("attention", "ffn")), *config.adaptive.candidates])
    )
    # Of the projections on one rank, [outputs, inputs].
    width, heads = model.model_dim, model.num_heads * model.head_dim // tensor
    pairs, wide = max(1, model.num_kv_heads // tensor) * model.head_dim, model.ffn_dim // tensor
    shapes: dict[Kind, list[controllers.Shape]] = {
        "attention": [(heads, width), (pairs, width), (pairs, width), (width, heads)],
        "ffn": [(wide, width), (wide, width), (width, wide)],
    }
    keys: list[tuple[Kind, Format]] = [(kind, chosen) for kind in shapes for chosen in candidates]
    path, names = folder / MACHINE, [*("/".join(key) for key in keys), "memory"]
    stored: dict[str, float] = {}
    if world.is_first:
        # An earlier start has measured already, unless the file is missing or damaged.
        with suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(path.read_text(encoding="utf-8"))
            stored = {name: float(record[name]) for name in names}
    # All ranks get the first one's figures by the maximum; zeros make all of them measure.
    result = world.maxima(*(stored.get(name, 0.0) for name in names))
    if min(result) <= 0:
        with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
            weights = sum(local(parameter.detach()).nbytes for parameter in formats.model.parameters())
            own = controllers.measure_speeds(formats, shapes, candidates, num_rows=num_rows, device=world.device)
        result = world.maxima(*(own[key] for key in keys), memory_share(world.device, 3 * weights))
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)  # it is the first thing that a run writes
            write_atomic(path, json.dumps(dict(zip(names, result, strict=True)), indent=2) + "\n")
    return controllers.DtypeTimings(dict(zip(keys, result[:-1], strict=True)), result[-1])


def memory_share(device: torch.device, more_bytes: int = 0) -> float:
    """Share of a device's memory: this process's peak, others' present use, and `more_bytes` that are expected."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_reserved(device)
        return min(1.0, (total - free + own + more_bytes) / total)
    return min(1.0, (peak_resident_bytes() + more_bytes) / hardware()["memory_bytes"])
