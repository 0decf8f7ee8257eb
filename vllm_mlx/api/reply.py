"""Base of all wire types of replies."""

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """Written with `exclude_unset`: what was not set is not sent, what was set to null is null."""

    model_config = ConfigDict(protected_namespaces=())

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)
