"""Lines of a stream of events, and the JSON on them."""

import pytest

from vllm_mlx.cli.remote import event_of, events_of


@pytest.mark.parametrize("line", ["", ": keep-alive", "event: message_stop", "data: [DONE]", "data:[DONE]", "retry: 5"])
def test_lines_that_hold_no_event(line: str) -> None:
    assert event_of(line) is None


@pytest.mark.parametrize("line", ['data: {"a": 1}', 'data:{"a":1}', 'data:  {"a": 1}  '])
def test_an_event_may_have_any_space_before_it(line: str) -> None:
    assert event_of(line) == {"a": 1}


@pytest.mark.parametrize("line", ["data: ", "data: 5", "data: [1]", 'data: {"a"'])
def test_data_that_is_no_object_is_an_error(line: str) -> None:
    with pytest.raises(ValueError):
        event_of(line)


def test_the_events_of_a_stream() -> None:
    lines = ["event: a", 'data: {"i": 1}', "", ": ping", 'data: {"i": 2}', "", "data: [DONE]"]
    assert [event["i"] for event in events_of(lines)] == [1, 2]
