"""Sizes as people write them."""

import pytest

from vllm_mlx.cli.values import read_bytes, read_memory
from vllm_mlx.core.memory import physical_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("17179869184", 2**34),
        (17179869184, 2**34),
        (None, None),
    ],
)
def test_bytes(text: object, num_bytes: int | None) -> None:
    assert read_memory(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.7", 0.7), (0.7, 0.7), (".5", 0.5), ("1", 1.0), (1, 1.0), ("70%", 0.7), ("100 %", 1.0), ("0.5%", 0.005)],
)
def test_a_share_is_of_the_machines_memory(text: object, share: float) -> None:
    assert read_memory(text) == int(share * physical_memory())


@pytest.mark.parametrize(
    "text", ["", "lots", "-4GB", "0", "0GB", "24XB", "24GB more", "120%", "24", "1.5", "nan", "inf", "1e9", True]
)
def test_anything_else_is_refused_with_the_accepted_forms(text: object) -> None:
    with pytest.raises(ValueError, match=r"such as 24GB|at most 100%"):
        read_memory(text)


@pytest.mark.parametrize("text", ["", "20XB", "50%", "-1", "1e9", "20MB 5"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20MB"):
        read_bytes(text)
