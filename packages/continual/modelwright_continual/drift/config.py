"""Settings of the drift monitor. The reference's settings are frozen with it, because its thresholds depend on them."""

from dataclasses import dataclass

from modelwright.core.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """Settings of a reference: the size of a window, and how often and for how small a shift it may alarm."""

    window_requests: int = 1000
    """Number of requests in a window. Traffic determines how long a window lasts: twice the traffic, twice as many
    windows."""
    run_length: float = 200.0
    """Mean number of windows between two false alarms. The thresholds of all features together follow from it."""
    min_effect: float = 0.03
    """Smallest share of the probability mass that must have moved for an alarm, however significant a
    smaller shift is."""
    seed: int = 0
    """Seed of the resampling."""

    def __post_init__(self) -> None:
        if self.window_requests < 50:
            raise ConfigError(f"window_requests: must be at least 50, got {self.window_requests}; statistics need it")
        if not 5 <= self.run_length <= 2000:
            raise ConfigError(
                f"run_length: must be 5 to 2000 windows, got {self.run_length}; for fewer alarms use larger windows"
            )
        if not 0 <= self.min_effect < 1:
            raise ConfigError(f"min_effect: must be at least 0 and below 1, got {self.min_effect}; 0.03 is 3%")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Settings for checking a growing file and delivering alarms (`modelwright drift watch`)."""

    cooldown_windows: int = 10
    """Windows after an alarm in which the same features raise no further alarm; 0 reports every window."""
    poll_s: float = 5.0
    """Seconds between two polls of the file of requests."""
    timeout_s: float = 10.0
    """Seconds within which the webhook must answer."""
    first_retry_s: float = 1.0
    """Seconds before a failed delivery is retried; doubled after every failure."""
    max_retry_s: float = 60.0
    """Maximum number of seconds between two attempts."""

    def __post_init__(self) -> None:
        if self.cooldown_windows < 0:
            raise ConfigError(f"cooldown_windows: must not be negative, got {self.cooldown_windows}")
        for name in ("poll_s", "timeout_s", "first_retry_s", "max_retry_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.max_retry_s < self.first_retry_s:
            raise ConfigError(f"max_retry_s: {self.max_retry_s} is below first_retry_s, {self.first_retry_s}")
