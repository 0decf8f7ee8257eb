"""How many files a reader opens to follow a chat, and that docs/architecture.md names them in their order."""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import pytest

from tests.project.sources import PACKAGE
from tests.project.walk import (
    CACHED_TURN,
    CHAT,
    PAGE,
    RESTORED_TURN,
    Form,
    Leg,
    Sighting,
    counted,
    files_of,
    makers_of,
    render,
    table,
    walk,
    walks,
)

# Lower these when a walk gets shorter. A file on it changes the form of what it gets, or hands it on.
MAX_FILES = {"chat": 15, "cached turn": 10, "turn after a restart": 6}
MAX_MAKERS = {"chat": 11, "cached turn": 5, "turn after a restart": 3}
# Where a hand-over value is constructed, beside the file on the walk.
OTHER_MAKERS = {
    "Request": {"llm.py", *(f"api/{name}/decode.py" for name in ("anthropic", "encoders", "responses"))},
    "PromptInputs": {
        *("prompt/processor.py", "media/rendered.py", "media/vision.py"),  # completions, images, a probe
        *("runner/proofs.py", "runner/calibrate.py"),  # at load
        "ranks/wire.py",  # on another rank
        "scheduler/reranking.py",  # of one document
    },
    "Sequence": {
        *("runner/family_check.py", "runner/proofs.py", "runner/calibrate.py"),  # at load
        "scheduler/ahead.py",  # for no client
    },
    "StepPlan": {
        *("core/step.py", "runner/calibrate.py", "ranks/wire.py"),  # one that does nothing; at load; received
        "scheduler/encoder.py",  # of a model that generates nothing
    },
    "StepOutput": {"engine/engine.py", "runner/encoder_runner.py"},  # of a step without a model, of texts
    "Restore": {"ranks/wire.py"},
    "Match": {"ranks/wire.py"},
    "EncodedText": set(),
}
FORMS = {"chat": CHAT, "cached turn": CACHED_TURN, "turn after a restart": RESTORED_TURN}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Leg]]:
    return walks()


def test_a_walk_takes_no_more_files_than_it_did(found: Mapping[str, Sequence[Leg]]) -> None:
    for name, legs in found.items():
        print(counted(name, legs))
        assert len(files_of(legs)) <= MAX_FILES[name], "\n".join(files_of(legs))
        assert len(makers_of(legs)) <= MAX_MAKERS[name], "\n".join(makers_of(legs))


def test_the_documented_walks_are_those_that_requests_take(found: Mapping[str, Sequence[Leg]]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- walk: {name} -->" in page for name in found)
    assert render(page, found) == page, "python -m tests.project.walk"


def test_every_form_is_met_and_each_leg_goes_on_where_the_last_one_ended(found: Mapping[str, Sequence[Leg]]) -> None:
    for name, legs in found.items():
        assert [leg.form for leg in legs] == [form.name for form in FORMS[name]]
        assert all(leg.files[-1] == after.files[0] for leg, after in pairwise(legs)), table(legs)


@pytest.mark.parametrize("name", OTHER_MAKERS)
def test_a_hand_over_value_is_made_in_one_place(found: Mapping[str, Sequence[Leg]], name: str) -> None:
    on_the_walk = {leg.files[0] for legs in found.values() for leg in legs if leg.form == name}
    made = {file for file, names in calls().items() if name in names}
    assert len(on_the_walk) == 1 and made == on_the_walk | OTHER_MAKERS[name]


@cache
def calls() -> dict[str, set[str]]:
    """The names that each file of the package calls."""
    return {
        str(file.relative_to(PACKAGE)): {
            node.func.id
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for file in PACKAGE.rglob("*.py")
    }


def seen(form: int, number: int, makers: tuple[str, ...], sources: Mapping[str, str | None]) -> Sighting:
    return Sighting(form, object(), makers, number, dict(sources), list(sources)[-1])


ABC = tuple(Form(name, lambda value: False) for name in "abc")


def test_a_file_that_hands_a_value_on_is_on_the_walk_and_one_that_looks_at_it_is_not() -> None:
    order = [
        seen(0, 0, ("one.py",), {"one.py": None, "log.py": "one.py", "two.py": "one.py", "three.py": "two.py"}),
        seen(1, 1, ("three.py", "two.py"), {"three.py": None}),
        seen(2, 2, ("five.py", "four.py", "three.py"), {"five.py": None}),
    ]
    legs = walk(ABC, order)
    assert [leg.files for leg in legs] == [
        ("one.py", "two.py", "three.py"),
        ("three.py", "four.py", "five.py"),
        ("five.py",),
    ]


def test_a_form_that_is_not_met_after_the_one_before_fails() -> None:
    order = [seen(1, 0, ("one.py",), {"one.py": None}), seen(0, 1, ("one.py",), {"one.py": None})]
    with pytest.raises(AssertionError, match="no b was met"):
        walk(ABC, order)
