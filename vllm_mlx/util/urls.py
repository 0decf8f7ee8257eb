"""Addresses that users and settings give. It opens none."""

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
