"""How the weights of a checkpoint come back after they have left memory."""

from collections.abc import Callable
from dataclasses import dataclass

from ..runner.loading import Loading
from ..runner.model import Model
from ..runner.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """How to load the weights again, with what the first load measured."""

    begin: Callable[[], Loading[Model]]  # raises ModelLoadError, also for a checkpoint that has changed on disk
    run: Callable[[Model], Runner]
    weights_bytes: int
    room_bytes: int  # for what is in memory beside the weights while they are read
    load_s: float = 0.0  # what the first load took
    no_unload: str | None = None  # why the weights never leave; None if they may
    idle_unload_s: float = 0.0
