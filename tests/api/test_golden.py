"""A wire request of each protocol → its Request and the form of its reply, kept as files with every field honoured.

`tests/golden` has the bytes of replies. A change that is meant: `python -m tests.api.test_golden` writes the files, and
the diff shows what it does to clients.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.api.parameters import Decoded

from .anthropic.bodies import decoded as messages
from .bodies import decode, decode_text
from .responses.bodies import decoded as responses

FOLDER = Path(__file__).parent / "golden"
DECODERS: dict[str, Callable[..., Decoded[Any]]] = {
    "chat": decode,
    "completion": decode_text,
    "messages": messages,
    "responses": responses,
}


def plain(value: Any) -> Any:
    """A core value as JSON: its type's name first, fields at their default left out."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {
            each.name: getattr(value, each.name) for each in dataclasses.fields(value) if not _is_default(value, each)
        }
        return {"": type(value).__name__, **{name: plain(each) for name, each in given.items()}}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple | frozenset) else value


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(getattr(value, field.name) == default)


def decoded(name: str) -> str:
    made = DECODERS[name](**json.loads((FOLDER / f"{name}.request.json").read_text(encoding="utf-8")))
    return json.dumps(plain([made.request, made.reply]), indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_made_is_what_the_file_holds(name: str) -> None:
    assert decoded(name) == (FOLDER / f"{name}.decoded.json").read_text(encoding="utf-8")


def main() -> None:
    for name in DECODERS:
        (FOLDER / f"{name}.decoded.json").write_text(decoded(name), encoding="utf-8")


if __name__ == "__main__":
    main()
