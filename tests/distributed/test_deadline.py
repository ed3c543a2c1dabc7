"""Named waits with a limit."""

import time

import pytest

from meshtrain.distributed.deadline import Deadlines


def expired(name_limits: list[tuple[str, float]], seconds: float) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    deadlines = Deadlines(lambda name, limit: found.append((name, limit)))
    stack = [deadlines.limit(name, limit) for name, limit in name_limits]
    for each in stack:
        each.__enter__()
    time.sleep(seconds)
    for each in reversed(stack):
        each.__exit__(None, None, None)
    deadlines.close()
    return found


def test_a_wait_over_its_limit_is_named_with_where_all_threads_stand(capfd: pytest.CaptureFixture[str]) -> None:
    assert expired([("save of 7", 0.2)], 0.6) == [("save of 7", 0.2)]
    err = capfd.readouterr().err
    assert "error: 'save of 7' took more than its limit of 0.2 s; all threads stand here:" in err
    assert "test_deadline.py" in err


def test_a_wait_within_its_limit_is_none() -> None:
    assert expired([("save of 7", 5.0)], 0.2) == []


def test_the_shortest_of_nested_waits_counts() -> None:
    assert expired([("outer", 0.2), ("inner", 5.0)], 0.6) == [("outer", 0.2)]
    assert expired([("outer", 5.0), ("inner", 0.2)], 0.6) == [("inner", 0.2)]


def test_a_wait_that_has_ended_never_expires() -> None:
    found: list[str] = []
    deadlines = Deadlines(lambda name, limit: found.append(name))
    for _ in range(20):
        with deadlines.limit("short", 0.2):
            pass
    time.sleep(0.5)
    assert found == []
    with pytest.raises(ZeroDivisionError), deadlines.limit("failing", 0.1):
        raise ZeroDivisionError
    time.sleep(0.4)
    assert found == []
    deadlines.close()
