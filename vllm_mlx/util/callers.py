"""The words by which people know a client and an endpoint, in logs and tables. It knows no HTTP."""

import re

_MOST = 32  # characters of a client's name


def client_name(agent: str | None) -> str:
    """Return the name and version at the beginning of a user agent. Browsers begin with the name of an old browser."""
    if not agent or agent.startswith("Mozilla/"):
        return "browser" if agent else "unnamed"
    name = re.split(r"[ ;,]*[(;,]", agent, maxsplit=1)[0] or agent
    return name if len(name) <= _MOST else f"{name[:_MOST]}…"


def endpoint_name(path: str) -> str:
    """Return `chat` for `/v1/chat/completions`, and of other paths what follows `/v1/`."""
    return path.removeprefix("/v1/").removesuffix("/completions")
