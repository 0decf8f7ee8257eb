"""What is left of records, against a plain model of it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.disk.replay import Replay, drop_record, put_record, use_record

NAMES = st.sampled_from("abcdef")
SALTS = st.sampled_from(["", "x/", "x/1", "y/"])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, SALTS, st.none() | NAMES, st.text() | st.integers()),
        st.tuples(st.just("drop"), st.lists(NAMES, max_size=3)),
        st.tuples(st.just("use"), st.lists(NAMES, max_size=3)),
        st.tuples(st.just("clear"), SALTS),
    ),
    max_size=30,
)


def record(change: tuple[Any, ...]) -> bytes:
    kind, *rest = change
    return {"put": put_record, "drop": drop_record, "use": use_record}[kind](*rest)


class Model:
    """The same with lists, as slowly as it is obvious."""

    def __init__(self) -> None:
        self.values: list[tuple[str, str, str | None, Any]] = []
        self.order: list[str] = []

    def apply(self, change: tuple[Any, ...]) -> None:
        match change:
            case ["put", name, salt, base, value]:
                self.drop(lambda held: held[0] == name)
                self.values.append((name, salt, base, value))
                self.use(name)
            case ["drop", names]:
                self.drop(lambda held: held[0] in names)
            case ["use", names]:
                for name in names:
                    self.use(name)
            case ["clear", salts]:
                self.drop(lambda held: held[1].startswith(salts))

    def drop(self, goes: Any) -> None:
        self.values = [held for held in self.values if not goes(held)]
        kept = [held[0] for held in self.values]
        self.order = [name for name in self.order if name in kept]

    def use(self, name: str | None) -> None:
        bases, seen = {held[0]: held[2] for held in self.values}, []
        while name in bases and name not in seen:
            seen.append(name)
            self.order = [other for other in self.order if other != name] + [name]
            name = bases[name]


def replayed(changes: list[tuple[Any, ...]]) -> Replay:
    replay = Replay()
    for change in changes:
        if change[0] == "clear":
            replay.clear(change[1])
        else:
            replay.take(record(change), record(change))
    return replay


@given(CHANGES)
def test_records_do_what_they_say(changes: list[tuple[Any, ...]]) -> None:
    model, replay = Model(), replayed(changes)
    for change in changes:
        model.apply(change)
    kept = [(value.name, value.salt, value.base, value.value()) for value in replay.values.values()]
    assert (kept, list(replay.order)) == (model.values, model.order)
    assert not replay.unread


@given(CHANGES, st.integers(0, 400))
def test_what_was_not_used_for_longest_goes_first(changes: list[tuple[Any, ...]], max_bytes: int) -> None:
    replay = replayed(changes)
    replay.unread.append(b"?" * 50)
    order = list(replay.order)
    dropped = replay.shrink(max_bytes)
    assert dropped == order[: len(dropped)] and list(replay.order) == order[len(dropped) :]
    assert replay.num_bytes <= max_bytes
    assert not (dropped and replay.unread)


def test_records_that_cannot_be_read_stay_as_they_are() -> None:
    replay = Replay()
    strange = [b"", b"{}", b'["grow","a"]', b'["put","a"]', b"\xff", b'["put",1,"",null]\n1', b"[" * 100_000]
    for data in strange:
        replay.take(data, data)
    assert replay.unread == strange and not replay.values


def test_values_are_json_of_any_kind() -> None:
    value = {"a": [1, 1.5, -0.0, 10**40, None, True, "\ud83d", "\n"], "": float("inf")}
    [kept] = replayed([("put", "a", "", None, value)]).values.values()
    assert kept.value() == value and json.dumps(kept.value()) == json.dumps(value)
