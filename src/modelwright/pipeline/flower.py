"""The two apps of a Flower federation that fine-tunes a run's model (docs/federated.md).

Importing this module needs the extra `flower`; federated.py does the same over a transport of our own. The server's
paths and settings come from the configuration of the app (`flwr run --run-config`), a client's from its own node
(`flower-supernode --node-config`).
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelwright.core.errors import ConfigError
from modelwright.core.rundir import RunDir
from modelwright.federated.flower import (
    BoundedFedAvg,
    FlowerClient,
    check_flower,
    client_app,
    run_bounded_rounds,
    run_rounds,
    server_app,
)
from modelwright.federated.lora import combination, frozen_weights
from modelwright.federated.weights import weight_vector
from modelwright.pipeline.federated import begin_model, client_training, load_settings, write_model

if TYPE_CHECKING:
    from flwr.app import Context  # pyright: ignore[reportMissingImports]
    from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp.strategy import Strategy  # pyright: ignore[reportMissingImports]

NODE, RUN = "--node-config", "--run-config"


def client() -> "ClientApp":
    """A ClientApp that trains on the packed rows of a run.

    Its node's configuration has `model` (a run or a model folder), `rows` (the run), `settings` (the YAML file),
    `name`, `learning-rate` and `dir`, and may have `stage`, each as `modelwright federated client` takes it.
    """
    return client_app(_client_of, _note)


def server(strategy: "Strategy | None" = None) -> "ServerApp":
    """A ServerApp that runs all rounds and writes the model that comes out.

    Its run configuration has `model`, `settings` and `dir`, as `modelwright federated server` takes them.

    strategy: one of Flower's, which has its own sampling and number of clients, and does not bound updates; without it
    `BoundedFedAvg`, which also goes on after the last round in `dir`.
    """

    def main(grid: "Grid", context: "Context") -> None:
        options = context.run_config
        start, folder = Path(_text(options, "model", RUN)), Path(_text(options, "dir", RUN))
        config = load_settings(Path(_text(options, "settings", RUN)))
        check_flower(config)
        model = begin_model(start, config)
        frozen = frozen_weights(model, config.lora)
        weights = weight_vector(model, frozen)
        num_frozen = len(weights) - len(weight_vector(model))
        if strategy is not None:
            if num_frozen:
                raise ConfigError("lora.aggregation: fedex needs this project's strategy; set ffa, or name no strategy")
            result = run_rounds(grid, strategy, config, weights)
        else:
            bounded = BoundedFedAvg(
                config, folder, _note, combine=combination(model, config.lora), num_frozen=num_frozen
            )
            result = run_bounded_rounds(grid, bounded, weights)
        _note(f"wrote {write_model(model, result, start, config, folder)}")

    return server_app(main)


def _client_of(context: "Context") -> FlowerClient:
    options = context.node_config
    config = load_settings(Path(_text(options, "settings", NODE)))
    check_flower(config)
    local = client_training(
        Path(_text(options, "model", NODE)),
        RunDir(Path(_text(options, "rows", NODE))),
        config,
        stage=str(options.get("stage", "")),
        learning_rate=_rate(options),
        name=_text(options, "name", NODE),
        folder=Path(_text(options, "dir", NODE)),
    )
    num_frozen = len(weight_vector(local.model, local.frozen)) - len(weight_vector(local.model))
    return FlowerClient(config=config, train=local.round, num_frozen=num_frozen)


def _text(options: Mapping[str, Any], key: str, source: str) -> str:
    if not (value := options.get(key)) or not isinstance(value, str):
        raise ConfigError(f'{source}: {key} must be a text in quotes, got {value!r}; write {key}="..."')
    return value


def _rate(options: Mapping[str, Any]) -> float:
    rate = options.get("learning-rate")
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 < rate < math.inf:
        raise ConfigError(f"{NODE}: learning-rate must be a number above 0, got {rate!r}; write learning-rate=0.2")
    return float(rate)


def _note(line: str) -> None:
    print(f"modelwright: {line}", file=sys.stderr, flush=True)
