"""Base of the wire types of replies, and the template that writes one of them for every token."""

from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

MAX_ERROR_CHARS = 1_000


class Reply(BaseModel):
    """Written with `exclude_unset`: a field that was not set is not sent, one that was set to null is null."""

    model_config = ConfigDict(protected_namespaces=())

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"


ErrorText = Annotated[str, AfterValidator(_bounded)]  # bounded, since an error may quote what a client sent

TEXT = "\ue000text\ue000"  # stands for the text that a template leaves open


class Template:
    """An event of a stream as JSON that leaves one text open. To write it costs one escape and one join.

    `event` holds `TEXT` as the value of one field, or of two that get the same text.
    """

    def __init__(self, event: str) -> None:
        head, *between, tail = event.split(f'"{TEXT}"')
        self._head, self._tail = head, tail
        self._between = between[0] if between else None

    def write(self, text: str) -> bytes:
        escaped = escape(text)
        if self._between is None:
            return f"{self._head}{escaped}{self._tail}".encode()
        return f"{self._head}{escaped}{self._between}{escaped}{self._tail}".encode()
