"""An engine that has nothing to do returns memory once, and works on when a command comes."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

from modelwright.serve.engines import thread as engine_thread
from modelwright.serve.engines.thread import EngineThread, _Abort, _Stop


def test_memory_goes_back_once_while_an_engine_is_idle(monkeypatch):
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(engine_thread, "REST_AFTER_S", 0.01)
    monkeypatch.setattr(engine_thread, "give_back_memory", given_back.release)
    engine: Any = SimpleNamespace(has_work=False, abort=mock.Mock(return_value=False))
    idle = EngineThread(engine, info=mock.Mock())
    ended = []
    worker = threading.Thread(target=lambda: ended.append(idle._obey()))
    worker.start()
    assert given_back.acquire(timeout=30)
    assert not given_back.acquire(timeout=0.2)
    idle._commands.put(_Abort("a"))
    idle._commands.put(_Stop())
    worker.join(timeout=30)
    assert ended == [False]
    engine.abort.assert_called_once_with("a")


def test_an_engine_that_works_keeps_its_memory(monkeypatch):
    monkeypatch.setattr(engine_thread, "give_back_memory", mock.Mock(side_effect=AssertionError))
    engine: Any = SimpleNamespace(has_work=True)
    assert EngineThread(engine, info=mock.Mock())._obey()
