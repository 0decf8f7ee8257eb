"""Settings of the HTTP server, resolved and immutable."""

import re
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..core.catalogue import Catalogue
from ..core.config import DOCUMENTED, SettingsGroup
from ..core.errors import ConfigError, setting
from ..core.request import RequestLimits
from ..util.tenants import APIKey
from ..util.urls import http_url

MAX_BODY_BYTES = 256 * 1024 * 1024  # images come inside the body
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")  # browsers send it in lower case, and without a path
_HOST_NAME = re.compile(r"[^/\s]+")  # a port may follow


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class ConnectionLimits(SettingsGroup):
    max_connections: int = Field(default=1000, gt=0)
    """Connections open at the same time, idle ones included."""
    max_header_bytes: int = Field(default=64 * 1024, gt=0)
    head_s: float = Field(default=30.0, gt=0)  # the time in which a request's headers must arrive
    take_s: float = Field(default=30.0, gt=0)  # the time in which a client must read again, once all buffers are full


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class ServerConfig(SettingsGroup):
    models: Catalogue
    api_keys: tuple[APIKey, ...] = ()  # if all are admin keys, or there are none, requests need no key
    metrics_open: bool = False
    """Answer `/metrics` without an API key."""
    host_names: tuple[str, ...] = ()  # names of the server in addition to addresses and localhost; "*" means any name
    cors_origins: tuple[str, ...] = ()  # if empty, no CORS headers are sent
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = Field(default=30.0, gt=0)  # the time in which a body must arrive; long bodies get more
    limits: RequestLimits = Field(default_factory=RequestLimits)
    connections: ConnectionLimits = Field(default_factory=ConnectionLimits)
    max_requests_per_minute: int | None = Field(default=None, gt=0)
    """Requests per minute of one API key, or of one address if no key is needed. Default: no limit."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a stream sends a keep-alive event."""
    separate_reasoning: bool = True
    """Send reasoning in a separate field. If off, reasoning is part of the content of a chat completion, between tags,
    unless the request says otherwise."""
    messages_thinking: Literal["asked", "always"] = "asked"
    """Replies of `/v1/messages` with thinking blocks: replies to requests that ask for thinking (`asked`), or all
    (`always`)."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """Treatment of fields that OpenAI's endpoints do not know: `refuse` refuses the request; `warn` leaves the field
    out, and names it in the log and in the response header `x-unknown-fields`."""
    web_search: str | None = None
    """Address of a SearXNG server, or of an MCP server (`…/mcp`) that has a search tool. The web search tools of
    Anthropic and OpenAI use it. Default: no web search."""

    record_requests: str | None = None
    """File to which each request is appended for a report of a fault, as a line of JSON: how it ended, and its body
    with made-up letters instead of texts, images and names. Default: nothing is recorded."""

    def __post_init__(self) -> None:
        if not all(key.secret for key in self.api_keys):
            raise ConfigError(f"{setting('api_key')} must not be empty.")
        if self.web_search is not None and http_url(self.web_search) is None:
            raise ConfigError(
                f"{setting('web_search')} {self.web_search} is not an address: write it as http://127.0.0.1:8080."
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{setting('cors_origin')} {origin} is not an origin as browsers send it: write the scheme and the "
                    "host in lower case, without a path, such as https://example.com."
                )
        for name in self.host_names:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"{setting('allowed_host')} {name} is not a host name: write the name alone, such as example.com."
                )
