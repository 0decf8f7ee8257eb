"""The present stage of a server that starts, for those who wait for it. It knows no clock and no screen."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class LoadStage:
    """The present part of loading. The thread that loads writes it, and other threads read it."""

    model: str = ""
    name: str = ""  # empty until all checks that need no weights are done
    share: float | None = None  # of the weights, while they are read

    def begin(self, name: str, share: float | None = None) -> None:
        self.name, self.share = name, share

    def __str__(self) -> str:
        return f"{self.model}: {self.name}" + ("" if self.share is None else f", {self.share:.0%}")


UNSEEN = LoadStage()  # of a load whose stages are not shown: it is written and never read
