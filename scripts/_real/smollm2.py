"""Prints the folder of SmolLM2-135M-Instruct, which is made at the first call. `scripts/serve smollm2` serves it."""

from .checkpoints import checkpoint
from .sources import SMOLLM2

if __name__ == "__main__":
    print(checkpoint(SMOLLM2))
