"""The files that hold what clients, monitors and scripts rely on, and what makes each of them now.

Two kinds: what must not change, and words, which may change on purpose (`python -m tests.golden --write`).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.device_lanes import residency_actions

from . import commands, refusals, served, streams

FOLDER = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Golden:
    name: str
    make: Callable[[], str]
    is_words: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    @property
    def kept(self) -> str:
        return self.path.read_bytes().decode() if self.path.is_file() else ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


@cache
def _refusals() -> dict[str, refusals.Refusal]:
    return refusals.refusals() | {f"served: {name}": each for name, each in served.pages()["refused"].items()}


def _envelopes() -> str:
    """A line a refusal."""
    lines = (
        f"{json.dumps(name)}: {json.dumps([each.status, each.envelope], sort_keys=True)}"
        for name, each in _refusals().items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def _streams() -> dict[str, str]:
    return streams.pages()


GOLDENS = (
    *(Golden(f"streams.{name}.txt", lambda name=name: _streams()[name]) for name in streams.PATHS),  # type: ignore[misc]
    Golden("refusals.json", _envelopes),
    Golden("refusals.words.json", lambda: _json({name: each.message for name, each in _refusals().items()}), True),
    Golden("parameters.json", lambda: _json(commands.parameters())),
    Golden("settings.json", lambda: _json(commands.settings())),
    Golden("help.words.json", lambda: _json(commands.help_texts()), True),
    Golden("demo.txt", lambda: served.pages()["replies"]),
    Golden("status.json", lambda: _json(served.pages()["states"] | {"two keys, text only": served.with_keys()})),
    Golden("metrics.json", lambda: _json(served.metric_names())),
    Golden("residency.txt", residency_actions),
    Golden("metrics.words.json", lambda: _json(served.metric_words()), True),
)


def changed_words(old: str, new: str) -> Iterator[tuple[str, str, str]]:
    """Name, old and new words of everything that differs between two files of words."""
    before, after = (dict(_flat(json.loads(text or "{}"))) for text in (old, new))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield name, before.get(name, ""), after.get(name, "")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _flat(member, f"{name} {key}".strip())
    else:
        yield name, str(value)
