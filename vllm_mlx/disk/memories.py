"""What one server remembers, so that its next prompts continue the ones that it computed before it was started."""

from typing import Self

from .folder import Folder
from .kept import MAX_BYTES, Journal, Journals

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
    def at(cls, folder: Folder, fingerprint: str, *, cap_bytes: int) -> Self:
        """`folder` and `cap_bytes`: the disk tier's."""
        max_bytes = min(MAX_BYTES, cap_bytes // _CAP_SHARE)
        return cls(Journals(folder.database.shared(), charge=folder.charge, max_bytes=max_bytes), fingerprint)

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
