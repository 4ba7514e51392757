"""Models that give answers which were written by hand (`data/golden/augment_answers.yaml`), behind the interfaces that
augmentation has for models: an endpoint over HTTP, a language model, the words that a masked model fills in.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from modelwright.data.augment.augmentation import Span
from modelwright.data.augment.masked_replacement import Fill


@dataclass
class Endpoint:
    """An OpenAI-compatible API that translates by a table, after a delay, and repeats what the table lacks. It
    remembers the texts of each request.
    """

    answers: Mapping[str, str]
    delay_s: float = 0.0
    requests: list[list[str]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the answer to a request."""
        if path.endswith("/chat/completions"):
            (text,) = self._translate([request["messages"][-1]["content"]])
            choices = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]
            return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
        sources = [prompt.splitlines()[-2].partition(": ")[2] for prompt in request["prompt"]]
        choices = [self._choice(place, text, request) for place, text in enumerate(self._translate(sources))]
        return {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": choices[::-1]}

    def _choice(self, place: int, text: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """A model goes on with another line unless it is told to stop; a token is a character here."""
        (stop,) = request["stop"]
        answer = f" {text}{stop}And so on."[: request["max_tokens"]]
        reason = "stop" if stop in answer else "length"
        return {"index": place, "finish_reason": reason, "logprobs": None, "text": answer.partition(stop)[0]}

    def _translate(self, texts: list[str]) -> list[str]:
        self.requests.append(texts)
        time.sleep(self.delay_s)
        return [self.answers.get(text, text) for text in texts]


@contextmanager
def serve_translations(answers: Mapping[str, str]) -> Iterator[Endpoint]:
    """An endpoint on this machine."""
    serving = Endpoint(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(serving.answer(self.path, request)).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:
                pass

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    serving.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield serving
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def translations(recorded: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Both directions in one table."""
    return {entry["en"]: entry["de"] for entry in recorded} | {entry["de"]: entry["back"] for entry in recorded}


@dataclass(frozen=True)
class RecordedWriter:
    """A language model that knows some beginnings. Each entry has the end of a text `before` a gap ("^" is the
    beginning of a text), what the model `writes` there, and which of it `fits` what comes `after`.
    """

    entries: Sequence[Mapping[str, Any]]

    def complete(self, prompts: Sequence[str], *, max_tokens: int, seeds: Sequence[int]) -> list[str]:
        completions, num_asked = [], Counter[str]()
        for prompt in prompts:
            written = next(entry["writes"] for entry in self.entries if _on_one_line(prompt).endswith(entry["before"]))
            completions.append(written[num_asked[prompt] % len(written)])
            num_asked[prompt] += 1
        return completions

    def log_probs(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        pairs = zip(map(_on_one_line, contexts), map(_on_one_line, continuations), strict=True)
        return [0.0 if self._fits(context, following) else -9.0 for context, following in pairs]

    def _fits(self, context: str, following: str) -> bool:
        return any(
            context.endswith(f"{entry['before']} {entry['fits']}") and following.startswith(f"^ {entry['after']}")
            for entry in self.entries
        )


@dataclass(frozen=True)
class RecordedFills:
    """The words of a masked model, with probabilities, by places such as "brown [dog]": some words around the masked
    one, which no other text has.
    """

    places: Mapping[str, Mapping[str, float]]

    def fill(self, text: str, words: Sequence[Span], top_k: int) -> list[list[Fill]]:
        return [self._fills(text, word)[:top_k] for word in words]

    def _fills(self, text: str, word: Span) -> list[Fill]:
        masked = _on_one_line(f"{text[: word.start]}[{word.text}]{text[word.end :]}")
        (fills,) = [fills for place, fills in self.places.items() if place in masked]
        return [Fill(fill, probability) for fill, probability in fills.items()]


def _on_one_line(text: str) -> str:
    return " ".join(["^", *text.split()])
