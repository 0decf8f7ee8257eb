"""What was measured of a checkpoint on this machine, kept in the cache folder for the next start.

The speed of prefill is measured at each start in any case: it depends on what the machine does then.
"""

import logging
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Self

import mlx.core as mx
from pydantic import TypeAdapter, ValidationError
from xxhash import xxh3_64_hexdigest

from .. import __version__
from ..core.config import EngineConfig
from ..disk.kept import Journal, Memories, Restored
from ..runner.calibrate import Calibration, ImageCost
from ..runner.checkpoint import Checkpoint
from ..runner.mtp import HeadLoader
from ..runner.proofs import Proofs
from ..runner.weight_files import files_of

logger = logging.getLogger(__name__)
_NAME = "measured"
_NUM_BYTES = 2000  # of a record in memory, roughly


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a load measures and proves."""

    calibration: Calibration
    proofs: Proofs
    images: ImageCost | None = None
    video_fault: str | None = None
    load_s: float = 0.0


_FACTS = TypeAdapter(Facts)


class KnownFacts:
    """The facts of one checkpoint as it is served, on this chip, with these versions."""

    def __init__(self, journal: Journal | None = None):
        """Read them; without a `journal`, none are known, and none are kept."""
        self._journal = journal
        self.facts: Facts | None = None
        if journal is not None:
            journal.restore(self._take)
            journal.wait()

    @classmethod
    def of(cls, memories: Memories, config: EngineConfig, checkpoint: Checkpoint) -> Self:
        """Raises ModelLoadError for a `draft_model` that cannot be used."""
        if memories.journals is None:
            return cls()
        libraries = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-vlm", "transformers")]
        chip = mx.device_info().get("device_name", "cpu")
        trusts, head = config.trust_remote_code, ""
        if config.wants_drafts:
            head = HeadLoader(checkpoint, config.draft_model, trust_remote_code=trusts).digest
        stats = [(file.name, file.stat()) for file in files_of(checkpoint.path, "*.json") if file.is_file()]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        served = (
            chip,
            *libraries,
            __version__,
            config.text_only,
            config.max_pixels,
            config.wants_drafts,
            head,
            xxh3_64_hexdigest(repr(files).encode()),
        )
        return cls(memories.journals.open("facts", "/".join(map(str, (checkpoint.fingerprint(), *served)))))

    def keep(self, facts: Facts) -> None:
        if self._journal is not None:
            self._journal.put(_NAME, "", partial(_FACTS.dump_python, facts, mode="json"), num_bytes=_NUM_BYTES)

    def _take(self, restored: Restored) -> None:
        for kept in restored.values:
            try:
                self.facts = _FACTS.validate_python(kept.value())
            except (ValueError, ValidationError):
                logger.warning("What is kept of the checkpoint's first load cannot be read, and is measured again")
