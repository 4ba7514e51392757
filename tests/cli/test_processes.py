"""How a launch of several hosts ends that could not begin: one line, with the option that is wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from modelwright.cli.processes import USER, supervise
from modelwright.parallel import elastic
from modelwright.parallel.elastic import LaunchConfig

HOSTS = LaunchConfig(min_hosts=2, max_hosts=2, rdzv_endpoint="head:29400", run_id="mine")


def ended(monkeypatch: pytest.MonkeyPatch, launch: Any, *, is_done: bool = False) -> tuple[int, list[str]]:
    told: list[str] = []

    def say(text: str, code: int) -> int:
        told.append(text)
        return code

    monkeypatch.setattr(elastic, "launch", launch)
    return supervise(HOSTS, ["run", "tiny"], threads=1, is_done=lambda: is_done, say=say), told


@pytest.mark.parametrize("is_done", [True, False])
def test_a_launch_that_another_host_has_ended(is_done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = SimpleNamespace(closed=True, failed=False, asked=0, killed={})
    code, told = ended(monkeypatch, lambda *words, **more: closed, is_done=is_done)
    assert code == (0 if is_done else USER)
    assert all("'mine'" in text and "--run-id" in text for text in told)
    assert len(told) == (not is_done)


def test_hosts_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*words: Any, **more: Any) -> None:
        raise RendezvousClosedError

    code, (text,) = ended(monkeypatch, launch)
    assert code == USER
    assert "head:29400" in text
