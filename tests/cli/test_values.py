"""Amounts of memory as people write them."""

import pytest

from vllm_mlx.cli.memory import Bytes, MemoryAmount, Share, parse_memory


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("24GB", Bytes(24 * 10**9)),
        ("24 gb", Bytes(24 * 10**9)),
        ("24g", Bytes(24 * 10**9)),
        ("1.5GiB", Bytes(3 * 2**29)),
        ("800MiB", Bytes(800 * 2**20)),
        ("17179869184", Bytes(2**34)),
        (17179869184, Bytes(2**34)),
        ("0.7", Share(0.7)),
        (0.7, Share(0.7)),
        (".5", Share(0.5)),
        ("1", Share(1.0)),
        ("70%", Share(0.7)),
        ("100 %", Share(1.0)),
        (None, None),
    ],
)
def test_bytes_and_shares(text: object, amount: MemoryAmount | None) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize(
    "text", ["", "lots", "-4GB", "0", "0GB", "24XB", "120%", "24", "1.5", "nan", "inf", "1e9", True]
)
def test_anything_else_is_refused_with_the_accepted_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"such as 24GB|at most 100%"):
        parse_memory(text)


def test_a_share_is_of_the_machine_and_bytes_are_not() -> None:
    assert Share(0.5).to_bytes(1000) == 500
    assert Bytes(700).to_bytes(1000) == 700
