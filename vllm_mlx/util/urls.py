"""Addresses from users and settings, and short names for endpoints and clients. It opens no connection."""

import re
from urllib.parse import SplitResult, urlsplit


def http_url(text: str) -> SplitResult | None:
    """Return the parts of an address such as `http://host:8080/path`; None if the text is not such an address."""
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0
    except ValueError:  # brackets without an IPv6 address, or a port that is not a number up to 65535
        return None
    is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and has_port
    return parts if is_address and text.isprintable() and " " not in text else None


def endpoint_name(path: str) -> str:
    """Return a short name of an endpoint: `chat` for `/v1/chat/completions`, otherwise the path after `/v1/`."""
    return path.removeprefix("/v1/").removesuffix("/completions")


def client_name(agent: str | None) -> str:
    """Return the name and version at the beginning of a user agent, in at most 32 characters."""
    if not agent or agent.startswith("Mozilla/"):
        return "browser" if agent else "unnamed"
    return (re.split("[(;,]", agent, maxsplit=1)[0].strip() or agent)[:32]
