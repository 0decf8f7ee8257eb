"""Settings of the HTTP server, resolved and immutable."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..core.config import SettingsGroup
from ..core.errors import ConfigError, setting
from ..core.request import RequestLimits
from ..core.tenants import APIKey

MAX_BODY_BYTES = 256 * 1024 * 1024  # images come inside the body


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits(SettingsGroup):
    max_connections: int = Field(default=1000, gt=0)
    max_header_bytes: int = Field(default=64 * 1024, gt=0)
    head_s: float = Field(default=30.0, gt=0)  # the time in which a request's headers must arrive
    take_s: float = Field(default=30.0, gt=0)  # the time in which a client must read again, once all buffers are full


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(SettingsGroup):
    served_model_names: tuple[str, ...]  # the first is used if a request names no model
    api_keys: tuple[APIKey, ...] = ()  # if all are admin keys, or there are none, requests need no key
    metrics_open: bool = False  # /metrics needs no key
    host_names: tuple[str, ...] = ()  # names of the server beside addresses and localhost; "*": any name
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = Field(default=30.0, gt=0)  # the time in which a body must arrive; long bodies get more
    limits: RequestLimits = Field(default_factory=RequestLimits)
    connections: ConnectionLimits = Field(default_factory=ConnectionLimits)
    max_requests_per_minute: int | None = Field(default=None, gt=0)  # limit per client; None: no limit
    keep_alive_s: float = Field(default=10.0, gt=0)  # silence of a stream after which a keep-alive event is sent
    separate_reasoning: bool = True  # false: reasoning stays in the content, unless a request says otherwise
    messages_thinking: Literal["asked", "always"] = "asked"  # which replies of /v1/messages have thinking blocks

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(f"{setting('served_model_name')} must not be empty.")
        if not all(key.secret for key in self.api_keys):
            raise ConfigError(f"{setting('api_key')} must not be empty.")
