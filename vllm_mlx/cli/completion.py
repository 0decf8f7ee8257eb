"""Names of the models on this machine, for the Tab key. It reads names of folders and no checkpoint."""

from pathlib import Path


def downloaded(incomplete: str) -> list[str]:
    """Return the models in Hugging Face's cache and in LM Studio's folders that begin so."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from ..runner.checkpoint import LM_STUDIO

    cached = (folder.parent.name.removeprefix("models--") for folder in Path(HF_HUB_CACHE).glob("models--*/snapshots"))
    names = {name.replace("--", "/") for name in cached}
    for folder in (path for root in LM_STUDIO for path in Path(root).expanduser().glob("[!.]*/[!.]*")):
        names.add(f"{folder.parent.name}/{folder.name}")
    return sorted(name for name in names if name.startswith(incomplete))
