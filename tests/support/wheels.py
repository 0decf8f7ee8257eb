"""The smallest wheels that pip and uv install."""

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, *requires: str, files: Mapping[str, bytes] | None = None
) -> Path:
    """Write a wheel that holds its metadata and these files."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    requirements = "".join(f"Requires-Dist: {text}\n" for text in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: chat\n{requirements}"
    held = {
        **(files or {}),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for path, data in held.items()}
    rows = [f"{path},sha256={digest.decode().rstrip('=')}," for path, digest in digests.items()]
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**held, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,\n"])}.items():
            archive.writestr(path, data)
    return wheel
