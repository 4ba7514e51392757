"""A federated fine-tuning of a run's model: the server with the model, clients with rows of their own runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from modelwright.core.artifacts import read_manifest, write_artifact
from modelwright.core.config import digest, load_yaml, parse
from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.core.rundir import RunDir
from modelwright.core.seeds import derive_seed
from modelwright.data.loader import PackedLoader, PackedRows
from modelwright.data.tokenizer import Tokenizer
from modelwright.federated.client import FederatedClient
from modelwright.federated.config import FederatedConfig
from modelwright.federated.hub import Hub
from modelwright.federated.local_training import LocalTraining
from modelwright.federated.lora import attach_federated, combination, frozen_weights
from modelwright.federated.server import FederatedServer
from modelwright.federated.transport import read_keys
from modelwright.federated.weights import set_weights, weight_vector
from modelwright.model.adapters import merge_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.objectives.next_token import NextToken
from modelwright.optim.schedule import ScheduleConfig
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.model_folder import save_model_folder
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.stage_inputs import tokenizer_stage
from modelwright.train.config import TrainConfig

HEADER_BYTES = 2**22
"""Room for the JSON header of a message: keys and sealed shares of some thousand clients."""
MODEL_FOLDER = "model"
ROUND_FOLDER = "round"
"""Where in its folder a client keeps the round at hand; emptied before each round."""


def load_settings(path: Path) -> FederatedConfig:
    """Read the settings, equal for the server and all clients. Raises `ConfigError` that names file and field."""
    data = load_yaml(path)
    try:
        return parse(FederatedConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def serve_rounds(
    start: Path, config: FederatedConfig, *, keys: Path, folder: Path, host: str, port: int, note: Callable[[str], None]
) -> Path:
    """Run all rounds from the model of a run or a model folder; returns the folder of the model that came out.

    keys: file with the name and the secret key of every client; folder: for the state of the rounds and the model
    """
    known = read_keys(keys)
    if len(known) < config.min_clients:
        raise ConfigError(f"{keys}: has {len(known)} clients, min_clients is {config.min_clients}; add keys")
    model = begin_model(start, config)
    frozen = frozen_weights(model, config.lora)
    weights = weight_vector(model, frozen)
    hub = Hub(known, host=host, port=port, most_bytes=_most_bytes(len(weights)))
    note(f"waiting for clients at {host}:{hub.port}")
    try:
        server = FederatedServer(
            config=config,
            hub=hub,
            weights=weights,
            num_known=len(known),
            folder=folder,
            note=note,
            num_frozen=len(weights) - len(weight_vector(model)),
            combine=combination(model, config.lora),
        )
        result = server.run()
    finally:
        hub.close()
    return write_model(model, result, start, config, folder)


def write_model(model: Decoder, weights: np.ndarray, start: Path, config: FederatedConfig, folder: Path) -> Path:
    """Write the model with these global weights, adapters merged; returns its folder, which is in `folder`."""
    set_weights(model, weights, frozen_weights(model, config.lora))
    merge_adapters(model)
    with write_artifact(folder / MODEL_FOLDER, kind="federated", digest=digest(config)) as draft:
        save_model_folder(model, Tokenizer.load(find_model(start).source.folder), draft.path)
    return folder / MODEL_FOLDER


def take_part(
    start: Path,
    rows: RunDir,
    config: FederatedConfig,
    *,
    stage: str,
    learning_rate: float,
    keys: Path,
    name: str,
    host: str,
    port: int,
    folder: Path,
    note: Callable[[str], None],
) -> None:
    """Take part with the packed rows of a run until the server ends.

    start: the server's model, or one of the same shape and tokenizer; stage: the training stage whose rows are learned
    by next-token prediction, "" for the run's last of that kind; keys: file with this client's key
    """
    known = read_keys(keys)
    if name not in known:
        raise ConfigError(f"--name: {name!r} has no key in {keys}, only {', '.join(known) or 'none'}")
    local = client_training(start, rows, config, stage=stage, learning_rate=learning_rate, name=name, folder=folder)
    FederatedClient(
        name=name,
        key=known[name],
        host=host,
        port=port,
        config=config,
        train=local.round,
        most_bytes=_most_bytes(len(weight_vector(local.model, local.frozen))),
        note=note,
    ).run()


def client_training(
    start: Path, rows: RunDir, config: FederatedConfig, *, stage: str, learning_rate: float, name: str, folder: Path
) -> LocalTraining:
    """What a client trains with, as `take_part` describes it; sets PyTorch's threads to those of the run."""
    if threads := read_run_config(rows.config).hardware.num_threads:
        torch.set_num_threads(threads)
    model = begin_model(start, config)
    source, training = _rows_of(rows, start, stage, name)
    return LocalTraining(
        model=model,
        source=source,
        objective=NextToken,
        config=_plain_steps(training, learning_rate),
        folder=folder / ROUND_FOLDER,
        seed=derive_seed(config.seed, "client", name),
        frozen=frozen_weights(model, config.lora),
    )


def begin_model(start: Path, config: FederatedConfig) -> Decoder:
    """The model that all sides begin with, adapters included. start: a run or a model folder."""
    model = load_model(find_model(start).source.folder)
    attach_federated(model, config.lora, derive_seed(config.seed, "lora"))
    return model


def _rows_of(run: RunDir, start: Path, stage: str, name: str) -> tuple[PackedLoader, TrainConfig]:
    """The rows of a training stage, in an order of this client's, and the stage's settings."""
    config = read_run_config(run.config)
    # Stages with settings of an objective learn other things from their rows, which may be pairs.
    specs = {spec.name: spec for spec in config.trainings if spec.config is TrainConfig}
    if not specs or (stage and stage not in specs):
        raise ConfigError(
            f"--stage: {run.path} has no stage {stage!r} that learns the next token; "
            f"choose from {', '.join(specs) or 'those of another run'}"
        )
    spec = specs[stage] if stage else list(specs.values())[-1]
    if config.section(spec).lora.r:
        raise ConfigError(
            f"{spec.name}.lora.r: adapters of a federated training are in --settings; choose a --stage without them"
        )
    packed = run.stage(PACK.name).artifact
    read_manifest(packed, kind=PACK.name)
    assert spec.rows is not None
    folder = packed / spec.rows.name / "train"
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: {run.path} has no rows for {spec.name}; choose another --stage")
    _check_tokenizer(run.stage(tokenizer_stage(config)).artifact, run, start)
    rows, training = PackedRows(folder), config.section(spec)
    batch_rows = training.batch_rows(rows.seq_len)
    return PackedLoader(rows, batch_rows=batch_rows, seed=derive_seed(config.seed, "federated", name)), training


def _check_tokenizer(artifact: Path, run: RunDir, start: Path) -> None:
    """Raise `ConfigError` if the rows were made by another tokenizer than the model's; artifact: with the run's own."""
    own, model_file = (folder / "tokenizer.json" for folder in (artifact, find_model(start).source.folder))
    if not own.is_file() or own.read_bytes() != model_file.read_bytes():
        raise ConfigError(
            f"--rows: {run.path} was tokenized by another tokenizer than {start}; make the run with --init-from {start}"
        )


def _plain_steps(training: TrainConfig, learning_rate: float) -> TrainConfig:
    """The stage's settings with plain SGD at a constant rate: what FedAvg averages."""
    return replace(
        training,
        optimizer="sgd",
        learning_rate=learning_rate,
        lr_scaling="none",
        weight_decay=0.0,
        max_grad_norm=0.0,
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
        eval_every_steps=0,
        checkpoint_every_steps=0,
        checkpoint_every_minutes=0.0,
    )


def _most_bytes(num_weights: int) -> int:
    """Largest message: a number of 8 bytes for each weight and one more, and a header."""
    return 8 * (num_weights + 1) + HEADER_BYTES
