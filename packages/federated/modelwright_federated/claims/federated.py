"""Claim: federated averaging ends near central training on the same samples, also where each client holds other
modules.
"""

import gc
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from safetensors.torch import load_model, save_model

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.config import derive_seed
from modelwright.data.document import Document
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright_claims import training_run, workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import best_value, open_cache, tune_grids
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import percent_above
from modelwright_claims.training_run import HELDOUT_ROWS, loss_on
from modelwright_claims.workbench import VOCAB_SIZE, Size

if TYPE_CHECKING:  # the list of claims is read without Flower, which takes seconds to import
    from flwr.app import Context
    from flwr.serverapp import Grid

    from modelwright_federated.config import FederatedConfig
    from modelwright_federated.local_training import LocalTraining

NUM_CLIENTS = 4
NAMES = tuple(f"client-{number}" for number in range(NUM_CLIENTS))
OLD_SOURCES, NEW_SOURCES = ("python:stdlib", "python:topics"), ("python:torch", "python:numpy")
Split = Literal["iid", "module"]
SPLITS: Mapping[Split, str] = {"iid": "IID", "module": "by module"}
Strategy = Literal["fedavg", "fedadam"]
STRATEGIES: Mapping[Strategy, str] = {"fedavg": "FedAvg", "fedadam": "FedAdam"}
ROUND_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to train by AdamW: central, or at clients where a `split` says how they got their samples."""

    split: Split | None = None
    strategy: Strategy = "fedavg"
    batches_per_step: int = 1


CENTRAL: Mapping[str, Arm] = {
    "central, AdamW": Arm(),
    "central, AdamW, rows of all clients a step": Arm(batches_per_step=NUM_CLIENTS),
}
"""With steps as large as a client's, and with as many steps as a client makes one after another."""
AVERAGING: Mapping[str, Arm] = {
    f"{words}, {SPLITS[split]}": Arm(split=split, strategy=strategy)
    for split in SPLITS
    for strategy, words in STRATEGIES.items()
}
ARMS: Mapping[str, Arm] = {**CENTRAL, **AVERAGING}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes that all runs share."""

    model: Size
    num_rounds: int
    local_steps: int
    fraction: float

    @property
    def num_batches(self) -> int:
        return NUM_CLIENTS * self.num_rounds * self.local_steps


@dataclass(frozen=True, kw_only=True)
class FederatedRun:
    """A single training. heldout: the split on which its loss is taken."""

    plan: Plan
    method: str
    learning_rate: float
    server_learning_rate: float = 1.0
    """Without effect except for FedAdam."""
    seed: int
    heldout: Literal["validation", "test"] = "test"

    @property
    def arm(self) -> Arm:
        return ARMS[self.method]


def prepare(folder: Path, plan: Plan) -> None:
    """Write the rows of all sides and the first model into `folder`, unless they exist."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    documents = [one for one in machine_corpus(fraction=plan.fraction, skip=lambda *_: None) if one.kind == "prose"]
    old = [one for one in documents if one.source in OLD_SOURCES and one.split == "train"]
    new = [one for one in documents if one.source in NEW_SOURCES]
    tokenizer = train_tokenizer((one.text for one in old), TokenizerConfig(vocab_size=VOCAB_SIZE))
    _pack(old, folder / "old", tokenizer, plan)
    heldout = [one for one in new if one.split == "heldout"]
    for number, name in enumerate(("validation", "test")):
        _pack(heldout[number::2], folder / name, tokenizer, plan)
    training = [one for one in new if one.split == "train"]
    _pack(training, folder / "central", tokenizer, plan)
    for split in SPLITS:
        for name, own in zip(NAMES, dealt(training, split), strict=True):
            _pack(own, folder / split / name, tokenizer, plan)
    model = Decoder(plan.model.model_config(tokenizer.vocab_size))
    model.init_weights(0)
    loader = PackedLoader(PackedRows(folder / "old"), batch_rows=plan.model.batch_rows, seed=0)
    _train(model, loader, plan.model.train_config(), folder / "first", seed=0)
    save_model(model, str(folder / "first.safetensors"))
    write_atomic(folder / "done", json.dumps({"vocab_size": tokenizer.vocab_size}))


def dealt(documents: Sequence[Document], split: Split) -> list[list[Document]]:
    """The documents of each client, about as many characters for all: at random, or whole modules in the order of
    their names, so that neighbors in a library stay together.
    """
    if split == "iid":
        ordered = sorted(documents, key=lambda one: derive_seed(0, "deal", one.id))
    else:
        ordered = sorted(documents, key=lambda one: (one.meta["module"], one.id))
    ends = np.cumsum([len(one.text) for one in ordered])
    clients = np.minimum(NUM_CLIENTS - 1, (ends - 1) * NUM_CLIENTS // ends[-1])
    if split == "module":  # a module goes where it begins
        first = {one.meta["module"]: client for one, client in reversed(list(zip(ordered, clients, strict=True)))}
        clients = [first[one.meta["module"]] for one in ordered]
    return [[one for one, at in zip(ordered, clients, strict=True) if at == client] for client in range(NUM_CLIENTS)]


def _pack(documents: Sequence[Document], folder: Path, tokenizer: Tokenizer, plan: Plan) -> None:
    sequences = ((ids, None) for ids in tokenizer.encode_documents([one.text for one in documents]))
    config = PackConfig(seq_len=plan.model.seq_len, mode="best_fit")
    pack(sequences, folder, config, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)


def heldout_losses(folder: Path, runs: Sequence[FederatedRun]) -> Iterator[tuple[FederatedRun, float]]:
    """Make trainings; yields each with the held-out loss at its end, in nats per token. folder: of `prepare`.

    Central ones come first and are made side by side, each in a process of one thread, as clients are: a step of so
    small a model does not keep several threads busy.
    """
    central = [run for run in runs if run.method in CENTRAL]
    if central:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=_forking(), initializer=_use_one_thread) as pool:
            yield from zip(central, pool.map(partial(_heldout_loss, folder), central), strict=True)
    yield from ((run, _heldout_loss(folder, run)) for run in runs if run.method not in CENTRAL)


def _heldout_loss(folder: Path, run: FederatedRun) -> float:
    model = _first_model(folder, run.plan)
    if run.method in CENTRAL:
        size = central_size(run)
        loader = PackedLoader(PackedRows(folder / "central"), batch_rows=size.batch_rows, seed=run.seed)
        _train(model, loader, size.train_config(), folder / f"central-{os.getpid()}", seed=run.seed)
    else:
        from modelwright_federated.config import FederatedLoraConfig
        from modelwright_federated.weights import GlobalWeights

        weights = GlobalWeights(model, FederatedLoraConfig())
        weights.write(_federated(folder, run, weights.read()))
    return loss_on(model, list(PackedRows(folder / run.heldout).batches(HELDOUT_ROWS)))


def central_size(run: FederatedRun) -> Size:
    model, factor = run.plan.model, run.arm.batches_per_step
    return replace(
        model,
        batch_rows=model.batch_rows * factor,
        num_steps=run.plan.num_batches // factor,
        learning_rate=run.learning_rate,
    )


def first_loss(folder: Path, run: FederatedRun) -> float:
    """The held-out loss of the model that every training starts from."""
    return loss_on(_first_model(folder, run.plan), list(PackedRows(folder / run.heldout).batches(HELDOUT_ROWS)))


def _first_model(folder: Path, plan: Plan) -> Decoder:
    model = Decoder(plan.model.model_config(json.loads((folder / "done").read_text())["vocab_size"]))
    load_model(model, folder / "first.safetensors")
    return model


def _train(model: Decoder, loader: PackedLoader, config: TrainConfig, stage: Path, *, seed: int) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    train(
        TrainJob(
            model=model,
            objective=NextToken(loader),
            config=config,
            num_steps=config.num_steps,
            stage=StageDir(stage),
            seed=seed,
            input_digest="claim",
        )
    )


def _federated(folder: Path, run: FederatedRun, weights: np.ndarray) -> np.ndarray:
    """The global weights after all rounds, by Flower's simulation with processes of one thread."""
    from modelwright_federated.client import FederatedClient
    from modelwright_federated.server import FederatedServer, simulate

    shutil.rmtree(folder / "server", ignore_errors=True)
    config, results = _federated_config(run), list[np.ndarray]()

    def rounds(grid: "Grid", context: "Context") -> None:
        server = FederatedServer(
            config=config, grid=grid, context=context, weights=weights, folder=folder / "server", note=lambda line: None
        )
        results.append(server.run())

    simulate(
        rounds,
        lambda number: FederatedClient(
            name=NAMES[number], config=config, training=partial(_local_training, folder, run, NAMES[number])
        ),
        num_clients=NUM_CLIENTS,
        num_processes=min(NUM_CLIENTS, os.cpu_count() or 1),
    )
    return results[0]


def _forking() -> ForkServerContext:
    """Processes that are forked from one that has imported PyTorch and this module, which takes seconds of a core."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _use_one_thread() -> None:
    """Begin a forked process."""
    torch.set_num_threads(1)
    gc.freeze()  # every training begins with a full collection, which takes 0.2 s for what the imports have made


def _federated_config(run: FederatedRun) -> "FederatedConfig":
    from modelwright_federated.config import FederatedConfig

    return FederatedConfig(
        num_rounds=run.plan.num_rounds,
        local_steps=run.plan.local_steps,
        optimizer="adamw",
        learning_rate=run.learning_rate,
        batch_tokens=run.plan.model.batch_tokens,
        strategy=run.arm.strategy,
        server_learning_rate=run.server_learning_rate,
        min_clients=NUM_CLIENTS,
        round_timeout_s=ROUND_TIMEOUT_S,
    )


def _local_training(folder: Path, run: FederatedRun, name: str) -> "LocalTraining":
    """Return the training of a client, in a process of the simulation."""
    from modelwright_federated.local_training import LocalTraining

    torch.set_num_threads(1)
    assert run.arm.split is not None
    rows = PackedRows(folder / run.arm.split / name)
    return LocalTraining(
        model=_first_model(folder, run.plan),
        source=PackedLoader(rows, batch_rows=run.plan.model.batch_rows, seed=derive_seed(run.seed, name)),
        objective=NextToken,
        config=_federated_config(run),
        training=run.plan.model.train_config(),
        folder=folder / "rounds" / name,
        seed=run.seed,
    )


def sizes(folder: Path) -> Mapping[str, int]:
    """Rows of each client, by `split/name`."""
    return {f"{split}/{name}": PackedRows(folder / split / name).num_rows for split in SPLITS for name in NAMES}


MOST_ABOVE: Mapping[Split, float] = {"iid": 2.0, "module": 5.0}
"""Percent of the loss of central training, by how the clients' samples were dealt."""
LOSS, FIRST = "held-out loss, ", "before fine-tuning"
RATES: Mapping[str, Sequence[float]] = {
    **dict.fromkeys(CENTRAL, (3e-3, 9e-3, 2.7e-2)), **dict.fromkeys(AVERAGING, (1e-3, 3e-3, 9e-3)),
}  # fmt: skip
SERVER_RATES: Sequence[float] = (1e-2, 3e-2, 9e-2)
TUNING_SEED = 100


def plan_of(setting: Setting) -> Plan:
    if setting.quick:
        small = Size(model_dim=64, num_layers=1, seq_len=64, batch_rows=4, num_steps=40, learning_rate=3e-3)
        return Plan(model=small, num_rounds=2, local_steps=3, fraction=0.1)
    size = Size(model_dim=128, num_layers=2, seq_len=256, batch_rows=4, num_steps=400, learning_rate=3e-3)
    return Plan(model=size, num_rounds=20, local_steps=10, fraction=1.0)


def measure(setting: Setting) -> Measurement:
    plan, folder = plan_of(setting), setting.folder / "federated"
    prepare(folder, plan)
    cache = open_cache(setting, sys.modules[__name__], training_run, workbench, name="federated")

    def losses(runs: Sequence[FederatedRun]) -> list[float]:
        for run, loss in heldout_losses(folder, [run for run in runs if run not in cache]):
            cache[run] = loss
            rates = f"{run.learning_rate:g}" + f" and {run.server_learning_rate:g}" * (run.arm.strategy == "fedadam")
            setting.progress.note(f"{run.method} at {rates}, seed {run.seed}: {loss:.4f}")
        return [cache[run] for run in runs]

    best, tuning = tune(plan, losses, is_tuned=not setting.quick)
    seeds = range(1 if setting.quick else 3)
    runs = [replace(run, seed=seed, heldout="test") for run in best.values() for seed in seeds]
    samples: dict[str, list[float]] = {LOSS + method: [] for method in ARMS}
    for run, loss in zip(runs, losses(runs), strict=True):
        samples[LOSS + run.method].append(loss)
    untrained = FederatedRun(plan=replace(plan, num_rounds=0), method="", learning_rate=0.0, seed=0)
    samples[LOSS + FIRST] = [cache.get(untrained, lambda: first_loss(folder, untrained))]
    for method, by_rate in tuning.items():
        samples |= {f"rates, {method}": list(by_rate), f"tuning, {method}": list(by_rate.values())}
    server_rates = {method: run.server_learning_rate for method, run in best.items() if run.arm.strategy == "fedadam"}
    size = plan.model.describe()
    del size["steps"]  # of the first model; those of the arms follow from rows and batch
    return Measurement(
        samples=samples,
        conditions=size
        | {
            "clients": NUM_CLIENTS,
            "rounds": plan.num_rounds,
            "local steps": plan.local_steps,
            "samples": f"{plan.num_batches * plan.model.batch_rows} rows in every arm",
            "rates": ", ".join(f"{method} {run.learning_rate:g}" for method, run in best.items()),
            "server rates": ", ".join(f"{method} {rate:g}" for method, rate in server_rates.items()),
            "tuned on": "another seed and another half of the held-out modules",
            "text": "documentation of the standard library first; of PyTorch and NumPy at the clients, held out by "
            "module",
            "rows of clients": ", ".join(f"{name} {count}" for name, count in sizes(folder).items()),
            "seeds": len(seeds),
            "optimizer": "AdamW, with warmup and decay if central; at the clients at a constant rate, its state reset "
            "in every round",
        },
    )


def tune(
    plan: Plan, losses: Callable[[Sequence[FederatedRun]], list[float]], *, is_tuned: bool
) -> tuple[dict[str, FederatedRun], dict[str, dict[float, float]]]:
    """Return each arm's run at its best rates, the validation losses of its last search by rate. losses: makes runs.

    FedAdam's two rates are searched in turn, as a grid of both would take most of the time: that of the server at the
    best rate of FedAvg's clients, then that of the clients.
    """
    best = {
        method: FederatedRun(
            plan=plan, method=method, learning_rate=RATES[method][1], seed=TUNING_SEED, heldout="validation"
        )
        for method in ARMS
    }
    of_fedadam = [method for method, arm in ARMS.items() if arm.strategy == "fedadam"]

    def search(field: str, grids: Mapping[str, Sequence[float]]) -> dict[str, dict[float, float]]:
        found = tune_grids(grids, lambda tried: losses([replace(best[m], **{field: v}) for m, v in tried]), field)
        best.update({method: replace(best[method], **{field: best_value(one)}) for method, one in found.items()})
        return found

    if not is_tuned:
        best |= {method: replace(best[method], server_learning_rate=SERVER_RATES[1]) for method in of_fedadam}
        return best, {}
    tuning = search("learning_rate", {method: rates for method, rates in RATES.items() if method not in of_fedadam})
    for method in of_fedadam:
        best[method] = replace(best[method], learning_rate=best[method.replace("FedAdam", "FedAvg")].learning_rate)
    search("server_learning_rate", dict.fromkeys(of_fedadam, SERVER_RATES))
    around = {method: (rate / 3, rate, rate * 3) for method in of_fedadam if (rate := best[method].learning_rate)}
    return best, tuning | search("learning_rate", around)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """The averaging of a split is the arm that did best in tuning; the better central arm, the one with the lower loss
    on the test split itself.
    """
    judgment = Judgment()
    for split, limit in MOST_ABOVE.items():
        with judgment.part():
            arms = [method for method, arm in AVERAGING.items() if arm.split == split]
            own = min(arms, key=lambda method: min(samples[f"tuning, {method}"]))
            best = min(CENTRAL, key=lambda method: statistics.fmean(samples[LOSS + method]))
            above = {method: percent_above(samples[LOSS + own], samples[LOSS + method]) for method in CENTRAL}
            for method in CENTRAL:
                judgment.ask(f"loss above {method}, averaging, {SPLITS[split]}", above[method], "%")
            say = f"{own} ends {{0.mean:+.2f}}% beside {best}, the best central one"
            judgment.ask("", above[best], "%", "<=", limit, what=f"{own}, loss above {best}", say=say)
    judgment.show(samples, [LOSS + method for method in (*ARMS, FIRST)], "nats")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="Federated averaging ends near central training on as many samples, also where each client holds other "
    "modules.",
    source="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017 "
    "(arXiv:1602.05629); Zhao et al., Federated Learning with Non-IID Data, 2018 (arXiv:1806.00582)",
    published="direction: the accuracy of central training with IID samples, and less where clients hold other classes",
    compared=f"{NUM_CLIENTS} AdamW clients in Flower's simulation, samples dealt at random and by module, "
    "averaged by FedAvg or FedAdam, whichever was better in tuning, against central AdamW on the same rows, with "
    "batches as large as one client's and as those of all clients; equal samples, each arm at its "
    "own best rates, paired seeds",
    target=f"at most {MOST_ABOVE['iid']:g}% above the loss of the better central training for samples dealt at random, "
    f"at most {MOST_ABOVE['module']:g}% by module",
    headline=tuple(f"loss above central, AdamW, averaging, {words}" for words in SPLITS.values()),
)
