"""The models that a server offers, by the names that requests use. It knows no memory and no protocol."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from .config import ModelConfig
from .errors import ConfigError, ModelNotFound, setting, shown

ModelTask = Literal["chat", "completion", "vision", "embedding", "rerank", "not served"]


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


@dataclass(eq=False, slots=True, kw_only=True)
class Found:
    """A checkpoint in one of the `places`, as the headers of its files describe it."""

    name: str  # ORG/NAME
    folder: Path
    names: tuple[str, ...] = ()  # the short one first, unless it stands for another model too
    file_bytes: int = 0
    max_model_len: int | None = None
    task: ModelTask = "not served"
    fault: str | None = None  # why it is not served
    position: int | None = None  # of its entry; None before it was asked for
    changed_ns: int = 0  # when the last of its files changed, in content or rights


@dataclass(slots=True)
class Catalogue:
    """The entries by their positions. The first is the model of requests that name none.

    Raises ConfigError if there is no entry, or if a text is empty or names two entries.
    """

    entries: tuple[Entry, ...]
    places: tuple[str, ...] = ()  # `models_from`
    config_of_found: ModelConfig | None = None
    found: tuple[Found, ...] = ()  # at the last look
    named: tuple[Entry, ...] = field(init=False)  # the first entries; others were found, and asked for

    def __post_init__(self) -> None:
        self.named = self.entries
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
        if not owners and not self.places:
            raise ConfigError("No model is named that could be served.")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are listed, in the order of the entries, and then of checkpoints that can be served."""
        found = (each.names[0] for each in self.others if each.fault is None)
        return *(name for entry in self.named for name in entry.names), *found

    @property
    def others(self) -> list[Found]:
        """Return the checkpoints that no entry names: those that were asked for, others, and those not served."""
        others = [each for each in self.found if each.position is None or each.position >= len(self.named)]
        return sorted(others, key=lambda each: (each.fault is not None, each.position is None, each.position))

    def of_task(self, task: str) -> list[str]:
        """Return the names of checkpoints that can be served and have this task, or write texts for "chat"."""
        tasks = {"chat", "completion", "vision"} if task == "chat" else {task}
        return [each.names[0] for each in self.others if each.fault is None and each.task in tasks]

    def on_disk(self, name: str | None) -> Found | None:
        return next((each for each in self.found if name in each.names), None)

    def resolve(self, name: str | None) -> tuple[str, int]:
        """Return the name for the reply, and the position of the model: by its exact name, else by the longest pattern.

        Of patterns of one length, the one with fewer `*` wins, and then the one that is listed first. Without a name it
        is the default. Raises ModelNotFound.
        """
        if name is None and self.entries:
            return self.entries[0].name, 0
        asked, name = name, name or ""
        for position, entry in enumerate(self.named):
            if name in entry.names:
                return name, position
        if (found := self.on_disk(name)) is not None and found.position is not None:
            return name, found.position
        patterns = ((pattern, at) for at, entry in enumerate(self.entries) for pattern in entry.patterns)
        fitting = [each for each in patterns if fnmatchcase(name, each[0])]
        if fitting:
            return name, max(fitting, key=lambda each: (len(each[0]), -each[0].count("*")))[1]
        names = [listed for listed in self.names if listed.endswith(f"/{name}")] or self.names
        known = ", ".join(f"`{listed}`" for listed in names) or "nothing now"
        if not name:
            problem = (
                "Set `model`, since no model was used so far." if asked is None else "The name of the model is empty."
            )
            raise ModelNotFound(f"{problem} This server serves {known}.", param="model")
        raise ModelNotFound(f"The model `{shown(name)}` does not exist. This server serves {known}.", param="model")
