"""How many inputs a property is tried with."""

from hypothesis import settings

LONG = "long"  # the profile of scripts/fuzz
_FACTOR = 5


def examples(num: int) -> int:
    """`num` with every run of the tests, several times as many in a round of scripts/fuzz."""
    return num * _FACTOR if settings.get_current_profile_name() == LONG else num
