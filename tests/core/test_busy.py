"""What a run says of a machine that other processes use."""

import pytest

from modelwright.core.resources import busy_machine, num_usable_cores


class Others:
    def __init__(self, cores: float) -> None:
        self.cores = cores

    def begin(self) -> None: ...

    def seconds(self) -> float:
        return 1.0

    def other_cores(self) -> float:
        return self.cores


@pytest.mark.parametrize(("others", "threads", "is_busy"), [(0.1, 1, False), (0.5, 0, True), (0.1, 0, False)])
def test_a_machine_is_busy_where_a_thread_finds_no_core(others: float, threads: int, is_busy: bool) -> None:
    """threads: 0 for as many as there are cores. One thread beside little else waits for nothing anywhere."""
    text = busy_machine(Others(others), threads or num_usable_cores(), sleep=lambda _: None)
    assert bool(text) == is_busy
    assert not text or text.startswith(f"busy machine: other processes use 0.5 of {num_usable_cores()} cores")
