"""Base of the wire types of replies."""

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
