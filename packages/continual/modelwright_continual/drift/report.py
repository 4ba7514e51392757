"""Drift reports as text for a terminal."""

from datetime import UTC, datetime

from modelwright_continual.drift.check import DriftReport, FeatureDrift

_SHOWN_CHARS = 100


def as_text(report: DriftReport) -> str:
    """Formats a table of all features, then cause and examples of those that drifted."""
    times = [
        datetime.fromtimestamp(one, UTC).strftime("%Y-%m-%d %H:%M:%S") for one in (report.first_time, report.last_time)
    ]
    verdict = f"drift in {', '.join(report.alarmed)}" if report.alarm else "no drift"
    lines = [
        f"{times[0]} to {times[1]} UTC: {verdict} ({report.num_requests:,} requests, {report.num_sessions:,} sessions)",
        f"  {'':<18}{'statistic':>10}{'p':>10}{'adjusted p':>12}{'effect':>9}{'PSI':>8}",
        *(_row(feature) for feature in report.features),
        *(f"  note: {note}" for note in report.notes),
    ]
    for feature in report.features:
        if feature.alarm:
            category = f" ({_shortened(feature.category)!r})" if feature.category else ""
            lines.append(f"  {feature.name}: {feature.cause}{category}")
            lines += [f"    window:    {_shortened(text)}" for text in feature.window_examples]
            lines += [f"    reference: {_shortened(text)}" for text in feature.reference_examples]
    return "\n".join(lines)


def _row(feature: FeatureDrift) -> str:
    figures = f"{feature.statistic:>10.2f}{feature.p_value:>10.2g}{feature.adjusted_p:>12.2g}"
    mark = "  ALARM" if feature.alarm else ""
    return f"  {feature.name:<18}{figures}{feature.effect:>9.3f}{feature.psi:>8.3f}{mark}"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
