"""Settings of the HTTP side, resolved and immutable."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..core.api_key import APIKey
from ..core.config import SettingsGroup
from ..core.errors import ConfigError, setting
from ..core.limits import RequestLimits

MAX_BODY_BYTES = 256 * 1024 * 1024  # images come inside the body


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits(SettingsGroup):
    max_connections: int = Field(default=1000, gt=0)
    max_header_bytes: int = Field(default=64 * 1024, gt=0)
    head_s: float = Field(default=30.0, gt=0)  # for a request's headers to come, from the connection's first byte on
    take_s: float = Field(
        default=30.0, gt=0
    )  # for a client to take what is written, once its buffers and ours are full


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(SettingsGroup):
    served_model_names: tuple[str, ...]  # the first is the one used when a request names none
    api_keys: tuple[APIKey, ...] = ()  # without an ordinary one, no key is asked for
    metrics_open: bool = False  # /metrics needs no key
    host_names: tuple[str, ...] = ()  # the server answers under, beside addresses and localhost; "*": under any
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = Field(default=30.0, gt=0)  # for any body to come; long ones get more
    limits: RequestLimits = Field(default_factory=RequestLimits)
    connections: ConnectionLimits = Field(default_factory=ConnectionLimits)
    max_requests_per_minute: int | None = Field(default=None, gt=0)  # of one client; None: any number
    keep_alive_s: float = Field(default=10.0, gt=0)  # silence of a stream after which a keep-alive event is sent
    separate_reasoning: bool = True  # false: reasoning comes inside the content, between tags, unless asked otherwise
    messages_thinking: Literal["asked", "always"] = "asked"  # which replies of Messages have thinking blocks

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(f"{setting('served_model_name')} must not be empty.")
        if not all(key.secret for key in self.api_keys):
            raise ConfigError(f"{setting('api_key')} must not be empty.")
