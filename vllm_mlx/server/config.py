"""Settings of the HTTP side, resolved and immutable."""

from dataclasses import dataclass, field
from typing import Literal

from ..core.api_key import APIKey
from ..core.errors import ConfigError, setting
from ..core.limits import RequestLimits
from .connection import ConnectionLimits

MAX_BODY_BYTES = 256 * 1024 * 1024  # images come inside the body


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    served_model_names: tuple[str, ...]  # the first is the one used when a request names none
    api_keys: tuple[APIKey, ...] = ()  # without an ordinary one, no key is asked for
    metrics_open: bool = False  # /metrics needs no key
    host_names: tuple[str, ...] = ()  # the server answers under, beside addresses and localhost; "*": under any
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers
    max_body_bytes: int = MAX_BODY_BYTES
    body_s: float = 30.0  # for any body to come; long ones get more
    limits: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    max_requests_per_minute: int | None = None  # of one client; None: any number
    keep_alive_s: float = 10.0  # silence of a stream after which a keep-alive event is sent
    separate_reasoning: bool = True  # false: reasoning comes inside the content, between tags, unless asked otherwise
    messages_thinking: Literal["asked", "always"] = "asked"  # which replies of Messages have thinking blocks

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(f"{setting('served_model_name')} must not be empty.")
        if self.keep_alive_s <= 0:
            raise ConfigError("The keep-alive interval must be greater than 0.")
        if self.max_requests_per_minute is not None and self.max_requests_per_minute <= 0:
            raise ConfigError(f"{setting('max_requests_per_minute')} must be greater than 0.")
        if self.body_s <= 0:
            raise ConfigError(f"{setting('slow_client_s')} must be greater than 0.")
        if not all(key.secret for key in self.api_keys):
            raise ConfigError(f"{setting('api_key')} must not be empty.")
