"""The journals of one server: what makes its next prompts continue the ones that it computed before it was started."""

from pathlib import Path
from typing import Self

from .journal import MAX_BYTES, Journal, Journals
from .journal_file import Charge, Cipher
from .own_files import JOURNALS

_CACHED = frozenset({"replies", "prompts", "images"})  # kinds that a cleared cache takes along
_CAP_SHARE = 32  # a journal takes at most 1/32 of the tier's cap


class Memories:
    """None in place of a journal: what it would keep ends with the process."""

    def __init__(self, journals: Journals | None = None, fingerprint: str = ""):
        """`fingerprint`: the checkpoint's."""
        self._journals = journals
        self._fingerprint = fingerprint
        self.replies = self._open("replies", fingerprint)
        self.prompts = self._open("prompts", fingerprint)
        self.responses = self._open("responses")

    @classmethod
    def at(cls, root: Path, fingerprint: str, *, cap_bytes: int, charge: Charge, cipher: Cipher | None = None) -> Self:
        """`root` and `cap_bytes`: the disk tier's. `charge`: whether so many bytes may be written now."""
        max_bytes = min(MAX_BYTES, cap_bytes // _CAP_SHARE)
        return cls(Journals(root / JOURNALS, cipher=cipher, charge=charge, max_bytes=max_bytes), fingerprint)

    def images(self, rendering: str) -> Journal | None:
        """`rendering`: a digest of all that decides what is rendered from an image, besides the checkpoint."""
        return self._open("images", f"{self._fingerprint}-{rendering}")

    @property
    def num_bytes(self) -> int:
        """The size of all journals in the folder."""
        return 0 if self._journals is None else self._journals.num_bytes

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
