"""Secure aggregation: the mean of the clients' updates by Flower's SecAgg+ (Bonawitz et al. 2017, Bell et al. 2020).

Flower supports the protocol for its older strategies only. `secure_mean` runs one round of it between the messages that
a current strategy has made and the single reply, the mean, that the strategy receives.

The numbers are integers modulo 2^32. A client's update is scaled by its weight and rounded stochastically to one of
`target_range` steps from -r to r, so the error of the mean is less than one step for each client; see `mean_error`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from modelwright.core.config import ModelwrightError
from modelwright_federated.config import FederatedConfig
from modelwright_federated.flower import ARRAYS, CONFIG, weights_of
from modelwright_federated.local_training import ClientUpdate

MAX_LOSS = 32.0
"""Upper limit of a client's loss in nats per label; the loss is masked and summed like a weight, as this share of
`clip_norm`."""
HONEST_REFUSED = 1e-9
"""Maximum probability with which a round of honest clients is refused because of the length of its noise."""
FP32_SLACK = 1e-6
"""Relative slack: an update that was scaled down in FP32 may exceed `clip_norm` by 2^-23."""
NOISE_ROOM = 8.0
"""Margin above `clip_norm`, in standard deviations of a client's noise, before its numbers are clipped: 1
in 10^15 is."""
MODULUS_BITS = 32


@dataclass(frozen=True, kw_only=True)
class SecureResult:
    """Result of a round: the mean update, the names of its clients, and the number of clients that were lost."""

    mean: ClientUpdate
    clients: Sequence[str]
    num_lost: int


def client_noise_std(config: FederatedConfig) -> float:
    """Returns the standard deviation of one client's noise, such that `threshold` clients add enough for the sum."""
    noise = config.noise_multiplier * config.privacy.clip_norm
    return noise / math.sqrt(config.secure_aggregation.threshold)


def protocol(config: FederatedConfig, num_clients: int) -> dict[str, int | float]:
    """Returns the parameters that server and clients must share, by Flower's names. With noise every update has weight
    1; without, the number of its labels.

    The sum of all clients has to stay below the modulus: target_range is the largest power of 2 for which it does.
    """
    return {
        Key.THRESHOLD: config.secure_aggregation.threshold,
        Key.CLIPPING_RANGE: config.privacy.clip_norm + NOISE_ROOM * client_noise_std(config),
        Key.TARGET_RANGE: 2 ** (MODULUS_BITS - num_clients.bit_length()),
        Key.MAX_WEIGHT: 1.0 if config.noise_multiplier else float(config.local_steps * config.batch_tokens),
    }


def mean_error(config: FederatedConfig, *, num_drawn: int, num_clients: int, weight: float) -> float:
    """Returns the largest error of each number of the mean. weight: the sum of the clients' weights."""
    agreed = protocol(config, num_drawn)
    step = 2 * agreed[Key.CLIPPING_RANGE] / agreed[Key.TARGET_RANGE]
    return num_clients * step * agreed[Key.MAX_WEIGHT] / weight


class _Workflow(SecAggPlusWorkflow):
    """SecAgg+ that continues without clients that were lost before they shared their keys.

    In the last stage, Flower 1.42 asks the others for shares of such a client's key, which they never received, and
    fails.
    """

    def share_keys_stage(self, grid, context, state):  # pyright: ignore[reportIncompatibleMethodOverride]
        goes_on = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = set(state.active_node_ids)
        state.nid_to_neighbours = {
            node: state.nid_to_neighbours[node] & state.active_node_ids for node in state.active_node_ids
        }
        return goes_on


@dataclass
class _Round:
    """Takes the place of a strategy of Flower's older kind in the workflow, for one round."""

    messages: Sequence[Message]
    results: list[FitRes] = field(default_factory=list)

    def configure_fit(self, server_round: int, parameters: object, client_manager: object) -> list:
        (weights,) = {id(one.content[ARRAYS]): one.content[ARRAYS] for one in self.messages}.values()
        parameters = ndarrays_to_parameters([weights_of(weights).astype(np.float32)])
        told = dict(self.messages[0].content[CONFIG])
        return [(SimpleNamespace(node_id=one.metadata.dst_node_id), FitIns(parameters, told)) for one in self.messages]

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple[None, dict]:
        self.results = [result for _, result in results]
        return None, {}


def secure_mean(grid: Grid, context: Context, config: FederatedConfig, messages: Sequence[Message]) -> SecureResult:
    """Returns the mean of the updates of the clients that these messages go to, weighted by their labels.

    Raises `ModelwrightError` if too few clients stayed, or if their mean is longer than clipped updates can make it.
    """
    agreed = protocol(config, len(messages))
    legacy = LegacyContext(context=context, strategy=(step := _Round(messages)))  # pyright: ignore[reportArgumentType]
    told = messages[0].content[CONFIG]
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: told["server-round"]})
    legacy.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    workflow = _Workflow(
        num_shares=1.0,  # every client has a share of every other one's key
        reconstruction_threshold=config.secure_aggregation.threshold,
        max_weight=agreed[Key.MAX_WEIGHT],
        clipping_range=agreed[Key.CLIPPING_RANGE],
        quantization_range=int(agreed[Key.TARGET_RANGE]),
        modulus_range=2**MODULUS_BITS,
        timeout=config.round_timeout_s,
    )
    try:
        workflow(grid, legacy)
        if not step.results:
            raise ModelwrightError(f"fewer than {agreed[Key.THRESHOLD]} clients stayed to its end")
        names = sorted(str(one.metrics["name"]) for one in step.results)
        weight = float(sum(one.num_examples for one in step.results))
        change, (loss,) = parameters_to_ndarrays(step.results[0].parameters)
    except Exception as error:  # what clients send may be anything
        raise ModelwrightError(f"secure aggregation: {error}") from None
    mean = ClientUpdate(
        change, weight, loss * MAX_LOSS / config.privacy.clip_norm if not config.noise_multiplier else math.nan
    )
    _check_length(mean, config, names=names, num_drawn=len(messages))
    return SecureResult(mean=mean, clients=names, num_lost=len(messages) - len(names))


def _check_length(mean: ClientUpdate, config: FederatedConfig, *, names: Sequence[str], num_drawn: int) -> None:
    """Raises `ModelwrightError` for a mean that clients cannot have produced if they clip. The server has no other way
    to notice a client that does not clip.

    The norm of Gaussian noise of standard deviation d over N numbers exceeds d sqrt(N) by t with a probability of at
    most exp(-t^2 / 2 d^2) (Boucheron, Lugosi and Massart 2013, Concentration Inequalities, theorem 5.6).
    """
    clip_norm, size = config.privacy.clip_norm, math.sqrt(len(mean.change))
    error = mean_error(config, num_drawn=num_drawn, num_clients=len(names), weight=mean.weight)
    std = client_noise_std(config) / math.sqrt(len(names))
    most = math.hypot(clip_norm * (1 + FP32_SLACK) + error * size, std * size)
    most += std * math.sqrt(2 * math.log(1 / HONEST_REFUSED))
    if not mean.norm <= most:
        raise ModelwrightError(
            f"secure aggregation: the mean of {', '.join(names)} has a norm of {mean.norm:.3g}, above the {most:.3g} "
            f"that updates within privacy.clip_norm ({clip_norm:g}) and their noise can make; at least one of these "
            "clients does not clip, and rounds without it will pass"
        )
