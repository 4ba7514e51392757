"""Settings of federated fine-tuning, which must be equal on the server and all clients."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelwright.core.config import ConfigError, load_yaml, only_for, parse, unused_settings
from modelwright_federated.privacy import noise_multiplier


@dataclass(frozen=True, kw_only=True)
class SecureAggregationConfig:
    """SecAgg+ (Bell et al., CCS 2020), as Flower implements it: the server receives masked updates."""

    enabled: bool = False
    threshold: int = field(default=2, metadata=only_for("enabled"))
    """Minimum number of clients that stay until the end of a round, which is abandoned with fewer. As many clients that
    reveal their shares to the server can unmask another client's update, so set more than half of the clients."""

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise ConfigError(f"threshold: must be at least 2, got {self.threshold}; the sum of one is its update")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Differential privacy of each client's data (DP-FedAvg, McMahan et al. 2018)."""

    epsilon: float = 0.0
    """Largest privacy loss of all rounds together, which determines the noise; 0 adds no noise."""
    clip_norm: float = 0.0
    """Norm to which every client's update is clipped; 0 leaves bounding to `max_norm_ratio`."""
    delta: float = field(default=1e-5, metadata=only_for("epsilon"))
    """Probability with which the guarantee may fail; choose it well below one over the number of clients."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip_norm"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.epsilon and not self.clip_norm:
            raise ConfigError("clip_norm: noise hides an update only if its norm has a bound; set it above 0")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta: must be between 0 and 1, got {self.delta}; 1e-5 is usual")


@dataclass(frozen=True, kw_only=True)
class FederatedLoraConfig:
    """Low-rank adapters, which clients train instead of all weights."""

    r: int = 0
    """Rank of the adapters of all projections; 0 trains the model's own weights."""
    lora_alpha: float = field(default=16.0, metadata=only_for("r"))
    """Numerator of the scale lora_alpha / r of the adapters' output."""
    aggregation: Literal["ffa", "fedex", "personal"] = field(default="ffa", metadata=only_for("r"))
    """Treatment of the adapters: `ffa` trains B only, whose mean is exact; `fedex` trains A and B, and adds the error
    of their separate means to the frozen weights, which the server therefore sends in every round; `personal` averages
    A and leaves each client its own B."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ConfigError(f"r: must not be negative, got {self.r}; 8 is usual, 0 trains all weights")
        if not self.lora_alpha > 0:
            raise ConfigError(f"lora_alpha: must be above 0, got {self.lora_alpha}")


@dataclass(frozen=True, kw_only=True)
class FederatedConfig:
    """Rounds of local training and averaging."""

    num_rounds: int = 10
    local_steps: int = 10
    """Number of optimizer steps of a client in a round."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of the clients, with a constant learning rate. Its state is reset in every round. With `sgd`, which
    neither clips nor decays, one step of all clients equals one step on all their rows."""
    learning_rate: float = 1e-3
    batch_tokens: int = 4096
    """Number of tokens of a client's optimizer step, padding included."""
    strategy: Literal["fedavg", "fedprox", "fedadam"] = "fedavg"
    """Aggregation of updates: `fedavg` takes their mean (McMahan et al. 2017); `fedprox` does, too, and pulls each
    client towards the global weights (Li et al. 2020); `fedadam` uses the mean as the gradient of Adam (Reddi et al.
    2021)."""
    proximal_mu: float = field(default=0.1, metadata=only_for("strategy", "fedprox"))
    """Strength of FedProx's proximal term."""
    server_learning_rate: float = field(default=1e-3, metadata=only_for("strategy", "fedadam"))
    """Learning rate of the server's Adam, whose moments decay with 0.9 and 0.99."""
    clients_per_round: int = 0
    """Number of clients that are drawn for a round; 0 takes all that are connected."""
    min_clients: int = 2
    """Minimum number of clients that must be connected before a round begins, and of usable updates in a round."""
    round_timeout_s: float = 600.0
    """Seconds after which a client that has not answered is left out of the round."""
    max_norm_ratio: float = 3.0
    """Maximum ratio of an update's norm to the lower median of its round; a longer update is scaled down. A single
    update is compared with the last round that had two. The server cannot apply it under secure aggregation."""
    seed: int = 0
    lora: FederatedLoraConfig = field(default_factory=FederatedLoraConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        for name in (
            "num_rounds", "local_steps", "min_clients", "round_timeout_s", "learning_rate", "batch_tokens",
            "server_learning_rate", "proximal_mu",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.clients_per_round and self.clients_per_round < self.min_clients:
            raise ConfigError(
                f"clients_per_round: {self.clients_per_round} is below min_clients, {self.min_clients}; raise it"
            )
        if self.max_norm_ratio < 1:
            raise ConfigError(f"max_norm_ratio: must be at least 1, got {self.max_norm_ratio}; 3 is usual")
        secure, privacy = self.secure_aggregation, self.privacy
        if secure.enabled and not privacy.clip_norm:
            raise ConfigError("privacy.clip_norm: secure aggregation needs a bound of the numbers that it sums; set it")
        if secure.enabled and self.min_clients < secure.threshold:
            raise ConfigError(
                f"min_clients: {self.min_clients} is below secure_aggregation.threshold, {secure.threshold}; raise it"
            )
        if self.lora.r and self.lora.aggregation == "fedex" and (secure.enabled or privacy.epsilon):
            raise ConfigError(
                "lora.aggregation: fedex needs every client's own adapters, which secure aggregation and noise hide; "
                "set ffa"
            )
        if self.lora.r and self.lora.aggregation == "fedex" and self.strategy == "fedadam":
            raise ConfigError("strategy: fedex needs the exact mean of the clients' adapters; set fedavg or fedprox")
        if privacy.epsilon and self.strategy == "fedadam":
            raise ConfigError("strategy: Flower adds noise to what fedadam makes of the updates; set fedavg or fedprox")
        if privacy.epsilon and not self.clients_per_round:
            raise ConfigError("clients_per_round: the noise is for a fixed number of clients; set it above 0")

    @property
    def num_awaited(self) -> int:
        """Number of clients that must be connected before a round begins."""
        return self.clients_per_round or self.min_clients

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of updates in units of `clip_norm`; 0 without noise."""
        privacy = self.privacy
        if not privacy.epsilon:
            return 0.0
        return noise_multiplier(privacy.epsilon, delta=privacy.delta, num_rounds=self.num_rounds)


def load_settings(path: Path) -> FederatedConfig:
    """Loads the settings. Raises `ConfigError` that names file and field."""
    data = load_yaml(path)
    try:
        config = parse(FederatedConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if unused := unused_settings(config):
        raise ConfigError(f"{path}: without effect: {'; '.join(unused)}; remove them")
    return config
