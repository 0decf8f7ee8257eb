"""Bytes that something of all requests may take together. Safe to share between threads; holds none of it."""

import threading


class ByteRoom:
    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.Lock()

    def enter(self, num_bytes: int) -> bool:
        """Whether there was room."""
        with self._lock:
            has_room = self.num_bytes + num_bytes <= self.max_bytes
            self.num_bytes += num_bytes if has_room else 0
            return has_room

    def leave(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes
