"""Names follow from everything that a record's numbers depend on, and headers make sense."""

from dataclasses import replace

import pytest

from tests.disk.samples import run, state
from vllm_mlx.disk.record import checkpoint_folder, name_of, nbytes_of

OTHERS = [
    run(seed=1),
    run(num_tokens=7),
    run(fingerprint="other"),
    run(salt="mine"),
    run(4, parent="a"),
    run(5, parent="a"),
    run(4, parent="b"),
    state(4, "a"),
    state(5, "a"),
]


def test_a_name_follows_from_all_that_the_numbers_depend_on() -> None:
    names = {name_of(header) for header in (run(), *OTHERS)}
    assert len(names) == 1 + len(OTHERS)
    assert {name_of(header) for header in (run(), *OTHERS)} == names


def test_a_name_does_not_depend_on_how_the_numbers_lie() -> None:
    assert name_of(replace(run(), layout={}, s_per_token=1.0, rule={})) == name_of(run())


def test_the_same_tokens_with_other_windows_have_another_name() -> None:
    names = {name_of(replace(run(), layout={"window_offset": offset})) for offset in (0, 3)}
    assert len(names) == 2


def test_parts_of_an_identity_cannot_pass_for_each_other() -> None:
    assert name_of(run(fingerprint="ab", salt="c")) != name_of(run(fingerprint="a", salt="bc"))
    assert name_of(run(fingerprint='a", "b', salt="")) != name_of(run(fingerprint="a", salt='b", "'))


def test_the_folder_of_a_checkpoint() -> None:
    names = {checkpoint_folder("a"), checkpoint_folder("b")}
    assert len(names) == 2 and all(len(name) == 16 for name in names)
    assert checkpoint_folder("../../etc") == checkpoint_folder("../../etc")


@pytest.mark.parametrize(
    "fields",
    [{"words": b"1234567"}, {"words": b""}, {"start": -1}, {"start": 3}, {"parent": "a"}, {"kind": "state"}],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_refused(fields: dict) -> None:
    with pytest.raises(ValueError):
        replace(run(), **fields)


def test_a_run_ends_after_its_tokens() -> None:
    assert run(4, 6, parent="a").end == 10 and state(4, "a").end == 4


@pytest.mark.parametrize(("dtype", "num_bytes"), [("BF16", 48), ("U8", 24), ("F32", 96), ("C64", 192), ("BOOL", 24)])
def test_the_bytes_of_a_shape(dtype: str, num_bytes: int) -> None:
    assert nbytes_of(dtype, (2, 3, 4)) == num_bytes and nbytes_of(dtype, (2, 0)) == 0
