"""What the machine has. Standard library only, so that it can be asked before anything is loaded."""

import os


def physical_memory() -> int:
    """In bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
