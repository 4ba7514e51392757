"""Settings of federated fine-tuning."""

from dataclasses import dataclass, field

from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError
from modelwright.federated.lora import FederatedLoraConfig


@dataclass(frozen=True, kw_only=True)
class SecureSumConfig:
    """Secure aggregation (Bonawitz et al., CCS 2017): the server learns the sum of the updates and none of them."""

    enabled: bool = False
    threshold: int = field(default=2, metadata=only_for("enabled"))
    """Clients that must stay to the end of a round; with fewer it is given up. More than half of the clients, so that
    the server cannot ask two halves for different secrets."""
    fraction_bits: int = field(default=24, metadata=only_for("enabled"))
    """Binary digits after the point of the numbers that are summed."""

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise ConfigError(
                f"threshold: must be at least 2, got {self.threshold}; the sum of one is that client's update"
            )
        if not 8 <= self.fraction_bits <= 40:
            raise ConfigError(f"fraction_bits: must be from 8 to 40, got {self.fraction_bits}; 24 is usual")


@dataclass(frozen=True, kw_only=True)
class ClientPrivacyConfig:
    """Differential privacy of each client's data (DP-FedAvg, McMahan et al. 2018)."""

    noise_multiplier: float = 0.0
    """Standard deviation of the noise in units of `clip_norm`; 0 for none."""
    clip_norm: float = 0.0
    """Norm to which every client's update is scaled down; 0 leaves it to the server's bound (`max_norm_ratio`)."""
    delta: float = field(default=1e-5, metadata=only_for("noise_multiplier"))
    """Probability with which the guarantee may fail; well below one over the number of clients."""

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "clip_norm"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.noise_multiplier and not self.clip_norm:
            raise ConfigError("clip_norm: noise hides an update only if its norm has a bound; set it above 0")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta: must be between 0 and 1, got {self.delta}; 1e-5 is usual")


@dataclass(frozen=True, kw_only=True)
class FederatedConfig:
    """Rounds of local training and averaging (FedAvg, McMahan et al. 2017; FedProx, Li et al. 2020)."""

    num_rounds: int = 10
    local_steps: int = 10
    """Updates that a client makes in a round."""
    client_fraction: float = 1.0
    """Probability with which a client takes part in a round, drawn for each by itself."""
    min_clients: int = 2
    """Clients that must be connected before a round begins, and whose updates it needs to count."""
    round_timeout_s: float = 600.0
    """A client that has not answered by then is left out of the round."""
    proximal_mu: float = 0.0
    """Strength of FedProx's pull to the global weights; 0 is FedAvg."""
    max_norm_ratio: float = 3.0
    """An update longer than so many times the lower median of its round is scaled down to that; a single one is
    measured by the last round that had two. Not under secure aggregation, where only clients see norms: set
    `privacy.clip_norm` there."""
    seed: int = 0
    lora: FederatedLoraConfig = field(default_factory=FederatedLoraConfig)
    secure_sum: SecureSumConfig = field(default_factory=SecureSumConfig)
    privacy: ClientPrivacyConfig = field(default_factory=ClientPrivacyConfig)

    def __post_init__(self) -> None:
        for name in ("num_rounds", "local_steps", "min_clients", "round_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if not 0 < self.client_fraction <= 1:
            raise ConfigError(f"client_fraction: must be above 0 and at most 1, got {self.client_fraction}")
        if self.proximal_mu < 0:
            raise ConfigError(f"proximal_mu: must not be negative, got {self.proximal_mu}; 0 is FedAvg")
        if self.max_norm_ratio < 1:
            raise ConfigError(f"max_norm_ratio: must be at least 1, got {self.max_norm_ratio}; 3 is usual")
        if self.secure_sum.enabled and not self.privacy.clip_norm:
            raise ConfigError("privacy.clip_norm: secure aggregation needs a bound of the numbers that it sums; set it")
        if self.secure_sum.enabled and self.min_clients < self.secure_sum.threshold:
            raise ConfigError(
                f"min_clients: {self.min_clients} is below secure_sum.threshold, {self.secure_sum.threshold}; raise it"
            )
        needs_each = self.lora.r and self.lora.aggregation == "fedex"
        if needs_each and (self.secure_sum.enabled or self.privacy.noise_multiplier):
            raise ConfigError(
                "lora.aggregation: fedex needs every client's own adapters, which secure aggregation and noise hide; "
                "set ffa"
            )
