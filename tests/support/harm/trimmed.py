"""The command line in a process that gives freed memory back to the system at SIGUSR2.

An allocator keeps freed pages for later, most of all between small blocks. They are no leak, and whether they stay is
chance: without them, the resident memory is what the process holds.
"""

import ctypes
import signal


def trim(*_: object) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))


if __name__ == "__main__":
    from vllm_mlx.cli.main import main

    signal.signal(signal.SIGUSR2, trim)
    main()
