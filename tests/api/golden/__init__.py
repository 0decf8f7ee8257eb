"""Wire bytes that are kept as they are: a change here is a change for every client."""

from pathlib import Path


def golden(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
