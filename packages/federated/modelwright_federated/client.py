"""A client of a federated training: it keeps its data, and answers messages with updates, clipped and possibly masked.

How much an update reveals depends on the client's own settings; a server with other settings gets no update.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins

from modelwright.core.artifacts import RunDir, read_manifest
from modelwright.core.config import ConfigError, ModelwrightError, derive_seed, digest
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.objectives.next_token import NextToken
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.pack import PACK, tokenizer_stage
from modelwright.pipeline.stages.specs import known_stages
from modelwright.train.config import TrainConfig
from modelwright_federated.config import FederatedConfig, load_settings
from modelwright_federated.flower import (
    ARRAYS,
    CLIENT,
    CONFIG,
    METRICS,
    NUM_LABELS,
    SETTINGS,
    array_record,
    check_flower,
    weights_of,
)  # fmt: skip
from modelwright_federated.local_training import ClientUpdate, LocalTraining
from modelwright_federated.secure import MAX_LOSS, client_noise_std, protocol
from modelwright_federated.weights import begin_model

TRAINING_FAILED = 2
"""Flower's error code for a ClientApp that raised an exception."""
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class FederatedClient:
    """Answers the messages of a server."""

    name: str
    config: FederatedConfig
    """Settings of the client, which the server's must equal."""
    training: Callable[[], LocalTraining]
    """Builds the local training; only called to train, since many messages of secure aggregation just exchange keys."""

    def answer(self, message: Message, context: Context) -> Message:
        """Answers a message. Raises `ModelwrightError` for a server with other settings."""
        if not self.config.secure_aggregation.enabled:
            return self._answer_plainly(message)
        told = message.content[RECORD_KEY_CONFIGS]
        if told[Key.STAGE] == Stage.SETUP:
            expected = protocol(self.config, int(told[Key.SAMPLE_NUMBER]))
            if any(told[key] != value for key, value in expected.items()):
                raise ModelwrightError("the server has other settings than this client; give both the same file")
        return secaggplus_mod(message, context, self._answer_to_be_masked)

    def _update(self, weights: np.ndarray, told: Mapping[str, Any]) -> ClientUpdate:
        if told.get(SETTINGS) != digest(self.config):
            raise ModelwrightError("the server has other settings than this client; give both the same file")
        update = self.training().round(
            weights, number=int(told["server-round"]) - 1, proximal_mu=float(told.get("proximal-mu", 0.0))
        )
        most = self.config.privacy.clip_norm
        return update.clipped(most) if most else update

    def _answer_plainly(self, message: Message) -> Message:
        weights = weights_of(message.content[ARRAYS]).astype(np.float32)
        update = self._update(weights, message.content[CONFIG])
        weights[len(weights) - len(update.change) :] += update.change
        metrics = {NUM_LABELS: float(update.weight)}
        if not self.config.privacy.epsilon:  # the loss follows from the data, and no noise covers it
            metrics["loss"] = update.loss
        content = {
            ARRAYS: array_record(weights),
            METRICS: MetricRecord(metrics),
            CLIENT: ConfigRecord({"name": self.name}),
        }
        return Message(RecordDict(content), reply_to=message)

    def _answer_to_be_masked(self, message: Message, context: Context) -> Message:
        """Answers with the update and, without noise, the loss, which `secaggplus_mod` masks. The number of labels and
        the name are not masked. With noise every update has the same weight, and each client adds its part of the
        noise.
        """
        asked = recorddict_to_fitins(message.content, keep_input=True)
        (weights,) = parameters_to_ndarrays(asked.parameters)
        update, noise = self._update(weights, asked.config), client_noise_std(self.config)
        if not np.isfinite(update.change).all() or not update.weight > 0:
            raise ModelwrightError("this client's update is not finite, or is over no labels, and is not sent")
        # 64 bits: the quantization has up to 30 of them, more than FP32 holds
        numbers, loss = update.change.astype(np.float64), update.loss / MAX_LOSS * self.config.privacy.clip_norm
        if noise:  # from the system's entropy: whoever knew the seed could take the noise out
            numbers, loss = numbers + np.random.default_rng().normal(0.0, noise, len(numbers)), 0.0
        reply = FitRes(
            Status(Code.OK, ""),
            ndarrays_to_parameters([numbers, np.array([loss])]),
            num_examples=1 if noise else int(update.weight),
            metrics={"name": self.name},
        )
        return Message(fitres_to_recorddict(reply, keep_input=True), reply_to=message)


def client_app(client_of: Callable[[Context], FederatedClient], note: Note) -> ClientApp:
    """Builds a ClientApp that trains. client_of: makes the client from its node's configuration, once for each message.

    The server is told of a failure without details, which could contain data; `note` receives the details.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            return client_of(context).answer(message, context)
        except ModelwrightError as error:
            note(f"training failed: {error}")
        except Exception:
            note(f"training failed: {traceback.format_exc()}")
        return Message(Error(TRAINING_FAILED, "training failed; the client's own log says why"), reply_to=message)

    @app.query()
    def is_there(message: Message, context: Context) -> Message:
        """Answers the server of a simulation, which asks before the first round so that this process has started by
        then.
        """
        return Message(RecordDict(), reply_to=message)

    return app


def client() -> ClientApp:
    """Returns the ClientApp of a SuperNode, whose configuration (`flower-supernode --node-config`) has `model` (a run
    or a model folder), `rows` (a run), `settings` (the YAML file), `name` and `dir`, and may have `stage`.
    """
    check_flower()
    return client_app(_client_of_node, note)


def _client_of_node(context: Context) -> FederatedClient:
    options, source = context.node_config, "--node-config"
    return run_client(
        text_option(options, "name", source),
        load_settings(Path(text_option(options, "settings", source))),
        start=Path(text_option(options, "model", source)),
        rows=RunDir(Path(text_option(options, "rows", source))),
        stage=str(options.get("stage", "")),
        folder=Path(text_option(options, "dir", source)),
    )


def text_option(options: Mapping[str, Any], key: str, source: str) -> str:
    """Reads a text from Flower's configuration values. Raises `ConfigError` that names the option."""
    if not (value := options.get(key)) or not isinstance(value, str):
        raise ConfigError(f'{source}: {key} must be a text in quotes, got {value!r}; write {key}="..."')
    return value


def note(line: str) -> None:
    print(f"modelwright: {line}", file=sys.stderr, flush=True)


def run_client(
    name: str, config: FederatedConfig, *, start: Path, rows: RunDir, stage: str, folder: Path
) -> FederatedClient:
    """Returns a client that trains on the packed rows of a run.

    start: the server's model, or one of the same shape and tokenizer; stage: the training stage whose rows are used, by
    next-token prediction, "" for the run's last of that kind; folder: for the client's own files.
    """

    def training() -> LocalTraining:
        if threads := read_run_config(rows.config).hardware.num_threads:
            torch.set_num_threads(threads)
        source, settings = rows_of(rows, config, start, stage, name)
        return LocalTraining(
            model=begin_model(start, config),
            source=source,
            objective=NextToken,
            config=config,
            training=settings,
            folder=folder,
            base=str(find_model(start).source.folder),
            seed=derive_seed(config.seed, "client", name),
        )

    return FederatedClient(name=name, config=config, training=training)


def rows_of(
    run: RunDir, config: FederatedConfig, start: Path, stage: str, name: str
) -> tuple[PackedLoader, TrainConfig]:
    """Returns the rows of a training stage, in an order specific to this client, and the stage's settings. Of the run,
    only the stage `pack` has to be finished.
    """
    settings, packed = read_run_config(run.config), run.stage(PACK.name).artifact
    read_manifest(packed, kind=PACK.name)
    # Stages with settings of an objective learn other things from their rows, which may be pairs. The run need not have
    # the stage: rows are packed for pretraining in a run that ends with `pack`.
    folders = {
        spec.name: packed / spec.rows.name / "train"
        for spec in known_stages()
        if spec.objective and spec.config is TrainConfig and spec.rows is not None
    }
    present = [name for name, folder in folders.items() if folder.is_dir()]
    if not present or (stage and stage not in present):
        raise ConfigError(
            f"--stage: {run.path} lacks rows of a stage {stage!r} that learns the next token; "
            f"choose from {', '.join(present) or 'those of another run'}"
        )
    name_of_stage = stage or present[-1]
    training = settings.sections.get(name_of_stage, TrainConfig())
    if training.lora.r:
        raise ConfigError(
            f"{name_of_stage}.lora.r: adapters of a federated training are in --settings; choose a --stage without them"
        )
    if training.objective:
        raise ConfigError(
            f"{name_of_stage}.objective: clients of a federated training learn the next token; choose a --stage without"
        )
    own = run.stage(tokenizer_stage(settings)).artifact / "tokenizer.json"
    expected = find_model(start).source.folder / "tokenizer.json"
    if not own.is_file() or own.read_bytes() != expected.read_bytes():
        raise ConfigError(
            f"--rows: {run.path} was tokenized by another tokenizer than {start}; make the run with --init-from {start}"
        )
    rows = PackedRows(folders[name_of_stage])
    if config.batch_tokens % rows.seq_len:
        raise ConfigError(
            f"batch_tokens: {config.batch_tokens} must be a multiple of the row length of {run.path}, {rows.seq_len}"
        )
    batch_rows = config.batch_tokens // rows.seq_len
    return PackedLoader(rows, batch_rows=batch_rows, seed=derive_seed(config.seed, "federated", name)), training
