"""A request's name finds its model: by an exact name, then by the longest pattern."""

from itertools import permutations

import pytest

from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import ModelConfig
from vllm_mlx.core.errors import ConfigError, ModelNotFound


def entry(name: str, *aliases: str, patterns: tuple[str, ...] = ()) -> Entry:
    return Entry(config=ModelConfig(model=f"org/{name}"), name=name, aliases=aliases, patterns=patterns)


CODER = entry("coder", "gpt-5", patterns=("claude-*",))
SMALL = entry("small", "claude-small", patterns=("claude-*haiku*", "gpt-*-mini"))
MODELS = Catalogue((CODER, SMALL))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (None, CODER),
        ("coder", CODER),
        ("small", SMALL),
        ("gpt-5", CODER),
        ("claude-small", SMALL),  # an exact name comes before the patterns of earlier entries
        ("claude-3-haiku", SMALL),  # the longest pattern wins, in any order
        ("claude-3-opus", CODER),
        ("gpt-5-mini", SMALL),
    ],
)
def test_the_model_of_a_name(name: str | None, found: Entry) -> None:
    assert MODELS.resolve(name) == (name or "coder", MODELS.entries.index(found))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("claude-small", "exact"),  # also an alias, and also if a longer pattern fits
        ("exact", "exact"),
        ("claude-4-haiku", "haiku"),
        ("claude-haiku", "haiku"),
        ("claude-4", "any claude"),
        ("gpt-5", "anything"),
        ("x-1", "fewer stars"),  # `**` is as long as `x*`, and says less
        ("y", "anything"),
    ],
)
def test_the_order_of_models_does_not_matter(name: str, found: str) -> None:
    entries = [
        entry("any claude", patterns=("claude-*", "c*")),
        entry("haiku", patterns=("claude-*haiku*",)),
        entry("exact", "claude-small", patterns=("claude-smal*",)),
        entry("anything", "y", patterns=("*", "**")),
        entry("fewer stars", patterns=("x*",)),
    ]
    for order in permutations(entries):
        assert order[Catalogue(order).resolve(name)[1]].name == found


def test_of_patterns_that_say_as_much_the_first_wins() -> None:
    both = entry("a", patterns=("a*",)), entry("b", patterns=("*b",))
    for order in (both, both[::-1]):
        assert Catalogue(order).resolve("ab") == ("ab", 0)


@pytest.mark.parametrize("name", ["", "Coder", "gpt", "my-claude-3"])
def test_an_unknown_name_is_answered_with_the_list(name: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        MODELS.resolve(name)
    assert refused.value.message.endswith("This server serves `coder`, `gpt-5`, `small`, `claude-small`.")


@pytest.mark.parametrize(
    "other",
    [
        entry("coder"),
        entry("b", "gpt-5"),
        entry("b", patterns=("claude-*",)),
        entry("b", patterns=("coder",)),
        entry("claude-*"),
    ],
)
def test_a_text_stands_for_one_model(other: Entry) -> None:
    with pytest.raises(ConfigError, match="stands for two models, org/coder and org/"):
        Catalogue((CODER, other))


def test_an_entry_may_repeat_its_own_name() -> None:
    assert Catalogue((entry("a", "b", "a"),)).names == ("a", "b")


def test_a_pin_and_an_idle_unload_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="`pin`, which keeps it in memory, and `idle_unload_s`"):
        Entry(config=ModelConfig(model="org/a", idle_unload_s=9), name="a", pin=True)
