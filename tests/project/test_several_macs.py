"""The computed speeds of docs/scaling.md against what others have measured."""

import pytest

from scripts.several_macs import FAST, LINKS, MODELS, rate

NAMED = {model.name: model for model in MODELS}


@pytest.mark.parametrize(
    ("name", "num_macs", "measured"),
    [("Qwen3 235B-A22B", 2, 26.2), ("Qwen3 235B-A22B", 4, 31.9), ("gpt-oss 120B", 2, 98)],
)
def test_the_formula_agrees_with_published_rates(name: str, num_macs: int, measured: float) -> None:
    assert rate(NAMED[name], FAST, num_macs) == pytest.approx(measured, rel=0.1)


def test_a_slower_link_is_never_faster() -> None:
    for model in MODELS:
        rates = [rate(model, link, 2) for link in LINKS]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < model.rate, "Ethernet of 1 Gbit/s makes no model faster"
