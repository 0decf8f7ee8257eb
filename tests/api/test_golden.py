"""A wire request of each protocol → its Request, kept as files. `tests/golden` has the bytes of replies.

A change that is meant: `python -m tests.api.test_golden` writes them anew, and the diff shows what it does to clients.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.core.request import Request

from .anthropic.bodies import decode as messages
from .bodies import chat, completion
from .responses.bodies import decode as responses

FOLDER = Path(__file__).parent / "golden"


DECODERS: dict[str, Callable[..., Request]] = {
    "chat": chat,
    "completion": completion,
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
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(getattr(value, field.name) == default)


def request_of(name: str) -> str:
    body = json.loads((FOLDER / f"{name}.request.json").read_text(encoding="utf-8"))
    return (
        json.dumps(plain(dataclasses.replace(DECODERS[name](**body), request_id="r")), indent=1, ensure_ascii=False)
        + "\n"
    )


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_made_is_what_the_file_holds(name: str) -> None:
    assert request_of(name) == (FOLDER / f"{name}.decoded.json").read_text(encoding="utf-8")


def main() -> None:
    for name in DECODERS:
        (FOLDER / f"{name}.decoded.json").write_text(request_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
