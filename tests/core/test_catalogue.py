"""A request's name finds its model: by an exact name, then by patterns in their order."""

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
        ("claude-3-haiku", CODER),  # the patterns of the first entry come first
        ("gpt-5-mini", SMALL),
    ],
)
def test_the_model_of_a_name(name: str | None, found: Entry) -> None:
    assert MODELS.resolve(name) == (name or "coder", MODELS.entries.index(found))


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
