"""Names of the models on this machine, for the Tab key. It reads names of folders and no checkpoint."""


def downloaded() -> list[str]:
    """Return the models in Hugging Face's cache and in LM Studio's folders. Typer keeps those that begin as typed."""
    from ..runner.checkpoint import HUB, checkpoints, folders_of

    return [name for name, _ in checkpoints(folders_of([HUB]))]
