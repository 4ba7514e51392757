"""Personal data out of texts that are logged, by the step `privacy` of cleaning."""

from dataclasses import dataclass, field

from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document


class RedactionFailed(Exception):
    """A check of the privacy step raised an exception, so nobody knows what the text holds."""


@dataclass(frozen=True)
class TextRedaction:
    """Equal values of one record get the same marker."""

    _step: Privacy = field(default_factory=lambda: Privacy(PrivacyConfig()))

    def pair(self, prompt: str, answer: str) -> tuple[str, str]:
        """Both texts with markers. Raises `RedactionFailed`; cleaning goes on there, because its texts are public."""
        meta = {"question": prompt, "answer": answer}
        document = Document(id="", text=f"{prompt}\n\n{answer}", kind="qa", split="open", source="", meta=meta)
        redacted = self._step.redact(document)
        failures = self._step.take_counts()["failed_validators"]
        if failures:
            raise RedactionFailed(", ".join(failures))
        return redacted.meta["question"], redacted.meta["answer"]

    def text(self, text: str) -> str:
        """The same for a text alone."""
        return self.pair(text, "")[0]
