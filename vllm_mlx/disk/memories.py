"""What one server remembers, so that its next prompts continue the ones that it computed before it was started."""

from pathlib import Path
from typing import Self

from .database import NAME
from .kept import MAX_BYTES, Charge, Journal, Journals
from .own_files import remove_journals

_CACHED = frozenset({"replies"})  # kinds that a cleared cache takes along
_CAP_SHARE = 32  # a kind takes at most 1/32 of the tier's cap


class Memories:
    """None in place of a journal: what it would keep ends with the process."""

    def __init__(self, journals: Journals | None = None, fingerprint: str = ""):
        """`fingerprint`: the checkpoint's."""
        self._journals = journals
        self.replies = self._open("replies", fingerprint)
        self.responses = self._open("responses")

    @classmethod
    def at(cls, root: Path, fingerprint: str, *, cap_bytes: int, charge: Charge) -> Self:
        """`root` and `cap_bytes`: the disk tier's. `charge`: whether so many bytes may be written now."""
        remove_journals(root)
        return cls(Journals(root / NAME, charge=charge, max_bytes=min(MAX_BYTES, cap_bytes // _CAP_SHARE)), fingerprint)

    def clear(self, salts: str = "") -> None:
        """Drop what belongs to salts that begin with `salts`, for every checkpoint of the folder.

        Stored responses stay: clients delete them.
        """
        if self._journals is not None:
            self._journals.clear(salts, _CACHED)

    def close(self) -> None:
        """Write what waits to be written."""
        if self._journals is not None:
            self._journals.close()

    def _open(self, kind: str, fingerprint: str = "") -> Journal | None:
        return None if self._journals is None else self._journals.open(kind, fingerprint)


NO_MEMORIES = Memories()
