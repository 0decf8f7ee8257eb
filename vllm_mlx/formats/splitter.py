"""Finds markers in a text that is still growing."""

import re
from collections.abc import Iterable


class MarkerSplitter:
    def __init__(self, markers: Iterable[str]):
        self._by_first: dict[str, list[str]] = {}
        for marker in sorted(set(markers), key=len, reverse=True):  # a longer marker wins over its own beginning
            self._by_first.setdefault(marker[0], []).append(marker)
        firsts = "".join(sorted(self._by_first))
        self._trigger = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def cut(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """Return (end, marker): `text[:end]` holds no marker, and `marker` stands at `end`.

        Without a marker, `text[end:]` is what may still become one; nothing can where the text is `final`.
        """
        hit = self._trigger.search(text)
        while hit is not None:
            start = hit.start()
            for marker in self._by_first[text[start]]:
                if text.startswith(marker, start):
                    return start, marker
                if not final and len(text) - start < len(marker) and marker.startswith(text[start:]):
                    return start, None
            hit = self._trigger.search(text, start + 1)
        return len(text), None
