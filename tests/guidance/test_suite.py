"""No grammar lets a model write what its schema forbids; docs/json-schema.md says what is kept and what refused."""

import pytest

from .scores import PAGE, page, scores


@pytest.fixture(scope="module")
def all_scores():
    return scores()


def test_no_invalid_value_can_be_written(all_scores) -> None:
    assert {keyword: score.wrong for keyword, score in all_scores.items() if score.wrong} == {}


def test_the_page_says_so(all_scores) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(all_scores), "run python -m tests.guidance.scores"
