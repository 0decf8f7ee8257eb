"""Settings of the HTTP side, resolved and immutable."""

from dataclasses import dataclass

from ..core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    served_model_names: tuple[str, ...]  # the first is the one used when a request names none
    api_keys: tuple[str, ...] = ()  # none: no key is asked for
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers
    max_body_bytes: int = 256 * 1024 * 1024  # images come inside the body
    keep_alive_s: float = 10.0  # silence of a stream after which a keep-alive event is sent
    separate_reasoning: bool = True  # false: reasoning comes inside the content, between tags, unless asked otherwise

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty.")
        if self.keep_alive_s <= 0:
            raise ConfigError("The keep-alive interval must be greater than 0.")
        if not all(self.api_keys):
            raise ConfigError("--api-key must not be empty.")
