"""How often a run was interrupted, as a rate to plan with."""

from dataclasses import dataclass

from scipy.stats import chi2


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Interruptions of a run while it trained."""

    num_faults: int
    """Interruptions without a word."""
    num_announced: int
    """Interruptions that SIGTERM announced."""
    hours: float
    """Time of training processes, repeated work included, without the last seconds before a fault; above 0."""

    @property
    def count(self) -> int:
        return self.num_faults + self.num_announced

    @property
    def per_hour(self) -> float:
        """The mean rate."""
        return self.count / self.hours

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95% interval of a Poisson rate, per hour (Garwood 1936)."""
        low = float(chi2.ppf(0.025, 2 * self.count)) / 2 if self.count else 0.0
        return low / self.hours, float(chi2.ppf(0.975, 2 * self.count + 2)) / 2 / self.hours

    @property
    def text(self) -> str:
        """How sure the rate is."""
        low, high = self.interval
        announced = f", {self.num_announced} of them announced" if self.num_announced else ""
        return (
            f"measured: {self.count} in {self.hours:.3g} h of training{announced}; 95% confidence: {low:.3g} to "
            f"{high:.3g} an hour"
        )
