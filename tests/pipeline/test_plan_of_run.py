from modelwright.pipeline.plan import about_times


def test_a_busy_machine_is_told_beside_its_estimates() -> None:
    assert len(about_times(0.9, 2)) == 1
    _, busy = about_times(1.4, 2)
    assert "(load 1.4 on 2 cores)" in busy
