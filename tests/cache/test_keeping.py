"""What eviction costs on recorded sessions of several people: beside the least recently used, and the clairvoyant."""

import pytest

from tests.support.keep_comparison import DEVICES, Comparisons, Tier
from tests.support.recorded_sessions import requests_of
from tests.support.rows import cases

NEAR = 1.1  # times the seconds under the clairvoyant rule, from half of the room on
NO_WORSE = 1.02  # times the seconds under the least recently used, anywhere
CASES = [
    pytest.param(4, 1, (0.5,), id="4 people"),
    *(
        pytest.param(
            people, seed, (0.05, 0.1, 0.25, 0.5, 0.75, 1.0), id=f"{people} people, all", marks=pytest.mark.full
        )
        for people, seed in ((4, 1), (8, 1), (8, 2))
    ),
]


@pytest.mark.parametrize("kind", cases(DEVICES, ["windows"]))
@pytest.mark.parametrize(("people", "seed", "shares"), CASES)
def test_seconds_are_near_the_clairvoyants_and_no_more_than_lru(
    kind: str, people: int, seed: int, shares: tuple[float, ...]
) -> None:
    comparisons = Comparisons(DEVICES[kind], requests_of(people=people, seed=seed))
    for tier in Tier:
        for share in shares:
            found = comparisons.at(share, tier)
            case = f"{tier.value}, {share:.0%}: {found.ours.total_s:.0f} s"
            assert found.ours.total_s <= NO_WORSE * found.lru.total_s, case
            if share >= 0.5:
                assert found.ours.total_s <= NEAR * found.clairvoyant.total_s, case
