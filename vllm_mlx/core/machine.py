"""Facts about the machine. It uses the standard library only, so that it works before anything is loaded."""

import os


def physical_memory() -> int:
    """The machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
