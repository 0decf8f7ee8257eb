"""The names under which the one loaded checkpoint is served."""

from collections.abc import Sequence

from ..core.errors import ModelNotFound, shown


class ServedModels:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))

    def resolve(self, name: str | None) -> str:
        """The name to reply under. A request that names no model means the served one."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(f"`{each}`" for each in self.names)
            raise ModelNotFound(f"The model `{shown(name)}` does not exist. This server serves {known}.", param="model")
        return name
