"""No grammar lets a model write what its schema forbids; docs/json-schema.md says what is kept and what refused."""

import pytest

from .scores import PAGE, Score, page, scores


def wrong(found: dict[str, Score]) -> dict[str, tuple[str, ...]]:
    return {keyword: score.wrong for keyword, score in found.items() if score.wrong}


def test_no_invalid_value_of_every_fifth_group_can_be_written() -> None:
    assert wrong(scores(5)) == {}


@pytest.mark.full
def test_no_invalid_value_can_be_written_and_the_page_says_so() -> None:
    found = scores()
    assert wrong(found) == {}
    assert PAGE.read_text(encoding="utf-8") == page(found), "run python -m tests.guidance.scores"
