"""The models that a server offers, by the names that requests use. It knows no memory and no protocol."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from .config import ModelConfig
from .errors import ConfigError, ModelNotFound, setting, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model: its settings, and the texts by which requests ask for it."""

    config: ModelConfig
    name: str
    aliases: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # `*` matches any text; patterns are not listed
    pin: bool = False  # no other model may take its place in memory

    def __post_init__(self) -> None:
        if self.pin and self.config.idle_unload_s:
            raise ConfigError(
                f"The model {self.name} has `pin`, which keeps it in memory, and `idle_unload_s`, which lets it leave. "
                "Leave one of the two out."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that are listed, without repetitions."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The entries in their order. The first is the model of requests that name none.

    Raises ConfigError if there is no entry, or if a text is empty or stands for two entries.
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        owners: dict[str, Entry] = {}
        for entry in self.entries:
            for text in (*entry.names, *entry.patterns):
                if not text:
                    raise ConfigError(f"{setting('served_model_name')} must not be empty.")
                if owners.setdefault(text, entry) is not entry:
                    raise ConfigError(
                        f"`{text}` stands for two models, {owners[text].config.model} and {entry.config.model}. "
                        "Give one of them another name."
                    )
        if not owners:
            raise ConfigError("No model is named that could be served.")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are listed, in the order of the entries."""
        return tuple(name for entry in self.entries for name in entry.names)

    def resolve(self, name: str | None) -> tuple[str, int]:
        """Return the name for the reply, and the position of the model: by its exact name, else by the longest pattern.

        Of patterns of one length, the one with fewer `*` wins, and then the one that is listed first. Without a name it
        is the default. Raises ModelNotFound.
        """
        if name is None:
            return self.entries[0].name, 0
        for position, entry in enumerate(self.entries):
            if name in entry.names:
                return name, position
        patterns = ((pattern, at) for at, entry in enumerate(self.entries) for pattern in entry.patterns)
        fitting = [found for found in patterns if fnmatchcase(name, found[0])]
        if fitting:
            return name, max(fitting, key=lambda found: (len(found[0]), -found[0].count("*")))[1]
        known = ", ".join(f"`{listed}`" for listed in self.names)
        if not name:
            raise ModelNotFound(f"The name of the model is empty. This server serves {known}.", param="model")
        raise ModelNotFound(f"The model `{shown(name)}` does not exist. This server serves {known}.", param="model")
