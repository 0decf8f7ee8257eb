"""The bundled demo checkpoint: a toy for trying the server. Knows where it lies, nothing else."""

from pathlib import Path

DEMO_PATH = Path(__file__).parent


def demo_path() -> Path:
    return DEMO_PATH
