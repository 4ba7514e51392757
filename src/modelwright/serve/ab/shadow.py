"""Shadow traffic: copies of requests that B answers while the server is idle. Requests of users come first: a copy that
is being computed when one arrives is aborted at once and started again later.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from modelwright.serve.account.exchange import Exchange, FinishedRequest
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation
from modelwright.serve.keys import ANYONE, Caller
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Service

log = logging.getLogger("modelwright.serve")

MOST_WAITING = 64
"""Most copies in the queue. Further ones are dropped, and counted."""
MOST_ATTEMPTS = 5
IDLE_POLL_S = 0.02
PREEMPTED = 499
"""Status that tells a preempted copy from one that failed."""


@dataclass
class _Copy:
    exchange: Exchange
    answer: str
    num_attempts: int = 0


class Shadows:
    """The queue of copies and its task. Belongs to the event loop. counted: called with each copy's outcome."""

    def __init__(self, service: Service, candidate: ServedModel, counted: Callable[[str], None]) -> None:
        self._service = service
        self._candidate = candidate
        self._counted = counted
        self._caller = Caller(ANYONE)
        self._waiting: deque[_Copy] = deque()
        self._some = asyncio.Event()
        self._current: Generation | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, exchange: Exchange, finished: FinishedRequest) -> None:
        """Queues a copy of a request that A has answered."""
        if len(self._waiting) >= MOST_WAITING:
            self._counted("dropped")
            return
        self._waiting.append(_Copy(exchange, finished.answer))
        self._some.set()

    def give_way(self) -> None:
        """Aborts the copy that is being computed, because a user's request has arrived."""
        if self._current is not None:
            # the error first: a stream that is only closed looks like an answer that has ended
            self._current.stream.put_error(ApiError(PREEMPTED, "A user's request has arrived."))
            self._current.stream.close()

    async def close(self) -> None:
        self.give_way()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            # polled, because nothing signals that the last answer to a user has finished
            if not self._is_idle():
                await asyncio.sleep(IDLE_POLL_S)
                continue
            copy = self._waiting.popleft()
            outcome = await self._answer(copy)
            if outcome == "preempted" and copy.num_attempts < MOST_ATTEMPTS:
                self._waiting.appendleft(copy)
            else:
                self._counted(outcome)
            if not self._waiting:
                self._some.clear()

    def _is_idle(self) -> bool:
        worker = self._service.worker
        return not worker.num_open and not worker.num_held and not self._service.is_draining

    async def _answer(self, copy: _Copy) -> str:
        copy.num_attempts += 1
        try:
            generation = await copy.exchange.open_on(self._candidate, self._caller)
            self._current = generation
            # opening yields to the event loop, so a user's request may have come before there was anything to abort
            if not self._is_idle():
                self.give_way()
            await generation.complete()
        except ApiError as error:
            if error.status == PREEMPTED:
                return "preempted"
            return "failed" if error.status >= 500 else "refused"
        except Exception:  # a bug that one request meets; the copies of others go on
            log.exception("a copy of a request could not be answered")
            return "failed"
        finally:
            if self._current is not None:
                self._current.stream.close()
            self._current = None
        answers = generation.answers
        if not all(answer.finish_reason for answer in answers):
            return "preempted"
        if copy.exchange.asked.temperature == 0:  # sampled answers differ even from the same weights
            is_same = "\n\n".join(answer.new_text for answer in answers) == copy.answer
            self._counted("same" if is_same else "different")
        return "answered"
