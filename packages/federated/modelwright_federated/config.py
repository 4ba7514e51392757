"""Settings of federated fine-tuning, equal for the server and all clients."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelwright.core.config import load_yaml, only_for, parse, unused_settings
from modelwright.core.errors import ConfigError
from modelwright_federated.privacy import noise_multiplier


@dataclass(frozen=True, kw_only=True)
class SecureAggregationConfig:
    """SecAgg+ (Bell et al., CCS 2020), as Flower implements it: the server receives masked updates."""

    enabled: bool = False
    threshold: int = field(default=2, metadata=only_for("enabled"))
    """Clients that must stay to the end of a round; with fewer the round is given up. As many clients that show the
    server their shares can unmask another one's update, so set more than half of the clients."""

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise ConfigError(f"threshold: must be at least 2, got {self.threshold}; the sum of one is its update")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Differential privacy of each client's data (DP-FedAvg, McMahan et al. 2018)."""

    epsilon: float = 0.0
    """Largest privacy loss of all rounds together, from which the noise follows; 0 adds no noise."""
    clip_norm: float = 0.0
    """Norm to which every client's update is scaled down; 0 leaves it to `max_norm_ratio`."""
    delta: float = field(default=1e-5, metadata=only_for("epsilon"))
    """Probability with which the guarantee may fail; well below one over the number of clients."""

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
    """Low-rank adapters, which clients train in place of all weights."""

    r: int = 0
    """Rank of the adapters of all projections; 0 trains the model's own weights."""
    lora_alpha: float = field(default=16.0, metadata=only_for("r"))
    """The adapters' output is scaled by lora_alpha / r."""
    aggregation: Literal["ffa", "fedex", "personal"] = field(default="ffa", metadata=only_for("r"))
    """`ffa` trains B alone, whose mean is exact; `fedex` trains A and B, and moves what their means miss into the
    frozen weights, which the server therefore sends in every round; `personal` averages A and leaves each client its
    own B."""

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
    """Updates that a client makes in a round."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """What clients train with, at a constant rate. Its state begins anew in every round. With `sgd`, which neither
    clips nor decays, one step of all clients is one step on all their rows."""
    learning_rate: float = 1e-3
    batch_tokens: int = 4096
    """Tokens of one update of a client, padding included."""
    strategy: Literal["fedavg", "fedprox", "fedadam"] = "fedavg"
    """How the server uses updates: `fedavg` takes their mean (McMahan et al. 2017); `fedprox` does, too, and pulls each
    client to the global weights (Li et al. 2020); `fedadam` takes the mean as the gradient of Adam (Reddi et al.
    2021)."""
    proximal_mu: float = field(default=0.1, metadata=only_for("strategy", "fedprox"))
    """Strength of FedProx's pull."""
    server_learning_rate: float = field(default=1e-3, metadata=only_for("strategy", "fedadam"))
    """Rate of the server's Adam; its moments decay with 0.9 and 0.99."""
    clients_per_round: int = 0
    """Clients that a round draws; 0 for all that are connected."""
    min_clients: int = 2
    """Clients that must be connected before a round begins, and whose updates it needs to count."""
    round_timeout_s: float = 600.0
    """A client that has not answered by then is left out of the round."""
    max_norm_ratio: float = 3.0
    """An update longer than so many times the lower median of its round is scaled down to that; a single one is
    measured by the last round that had two. The server cannot do that under secure aggregation."""
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
        """Clients that have to be connected before a round begins."""
        return self.clients_per_round or self.min_clients

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of updates in units of `clip_norm`; 0 for none."""
        privacy = self.privacy
        if not privacy.epsilon:
            return 0.0
        return noise_multiplier(privacy.epsilon, delta=privacy.delta, num_rounds=self.num_rounds)


def load_settings(path: Path) -> FederatedConfig:
    """Read the settings. Raises `ConfigError` that names file and field."""
    data = load_yaml(path)
    try:
        config = parse(FederatedConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if unused := unused_settings(config):
        raise ConfigError(f"{path}: without effect: {'; '.join(unused)}; remove them")
    return config
