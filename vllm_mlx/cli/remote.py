"""A running server as the commands see it: an address, a key, JSON and events. Knows no command and no model code."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Self
from urllib.parse import quote, urlsplit

import httpx

from ..core.errors import ConfigError
from ..util.urls import http_url
from .completion import downloaded
from .options import server_settings
from .settings import is_local, local_url
from .terminal import CommandFailed, WrongUsage, choose, option

CONNECT_S = 5.0
ANSWER_S = 30.0
_COMPLETION_S = 2.0  # a server that does not answer in time has no names to complete
UNTOLD = frozenset({"tools", "reasoning"})  # assumed capabilities of a model if its server does not name any
SILENCE_S = 300.0  # longest silence of a stream; the server sends something every ten seconds

UrlOption = Annotated[
    str | None, option("--url", "URL", "Address of the server. Default: the address in the settings of `serve`.")
]
KeyOption = Annotated[
    str | None,
    option("--api-key", "TEXT", "The server's API key. Default, on this machine: the key in the settings of `serve`."),
]


def served_names() -> list[str]:
    """Return the names of the server with the settings of this machine, for the Tab key."""
    with suppress(CommandFailed, ConfigError):
        return [model.name for model in find_server(None, None, answer_s=_COMPLETION_S).models()]
    return []


ModelOption = Annotated[
    str | None,
    option("--model", "TEXT", "Name of the model. Default: the served model.", autocompletion=served_names),
]


def _models() -> list[str]:
    return list(dict.fromkeys([*served_names(), *downloaded()]))


StartOption = Annotated[
    str | None,
    option(
        "--model",
        "TEXT",
        "Name of the model, which a new server loads. Default: the served model.",
        autocompletion=_models,
    ),
]


class NoServer(CommandFailed):
    """No program listens at the address."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int | None  # None: the server does not say
    searches: bool  # whether the server runs web searches
    capabilities: frozenset[str] = UNTOLD
    checkpoint: str = ""
    is_ready: bool = True  # whether its weights are in memory
    load_bytes: int = 0  # that they take
    is_found: bool = False  # whether it was found rather than named, so that it is not a default
    task: str = "chat"

    @classmethod
    def of(cls, card: Mapping[str, Any]) -> Self:
        """Read a model of `/v1/models`, even of another server."""
        return cls(
            name=str(card["id"]),
            max_model_len=card.get("max_model_len") or None,
            searches=card.get("web_search") is True,
            capabilities=UNTOLD if (told := card.get("capabilities")) is None else frozenset(map(str, told)),
            checkpoint=str(card.get("root", "")),
            is_ready=card.get("state", "ready") == "ready",
            load_bytes=int(card.get("load_bytes") or 0),
            is_found=card.get("found") is True,
            task=str(card.get("task") or "chat"),
        )

    @property
    def writes(self) -> bool:
        return self.task in ("chat", "completion", "vision")


@dataclass(frozen=True, slots=True)
class Remote:
    """`url` has no path. Every method raises CommandFailed, with a sentence that gives a remedy."""

    url: str
    api_key: str | None = None
    answer_s: float = ANSWER_S  # how long to wait for an answer that is not streamed

    def entries(self, path: str) -> list[dict[str, Any]]:
        """Return the entries of a list of the server."""
        entries = self.ask(path).get("data") or []
        if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
            raise CommandFailed(self._other_program())
        return entries

    def status(self) -> dict[str, Any]:
        """Return the status of the server."""
        fields: dict[str, Any] = self.ask("/v1/status")
        if not (isinstance(fields.get("build"), dict) and isinstance(fields.get("cache"), dict)):
            raise CommandFailed(self._other_program())
        return fields

    def model(self, name: str | None = None) -> Model:
        """Return the model to which the server gives this name, or the first model that writes, if there is one."""
        models = self.models()
        for model in models:
            if model.name == name or (name is None and (model.writes or not any(each.writes for each in models))):
                return model
        with suppress(CommandFailed, KeyError):  # a name may fit a pattern, which the list leaves out
            return Model.of(self.ask(f"/v1/models/{quote(name or '')}"))
        known = ", ".join(model.name for model in models)
        raise WrongUsage(f"{self.url} does not serve {name}. It serves {known}.")

    def chat_model(self, name: str | None, *, asks: bool = False) -> Model:
        """Return the model of this name. Without one, it is the default, or the one in memory, or the user chooses."""
        models = [model for model in self.models() if model.writes]
        if name is not None or not models or not (asks or models[0].is_found):
            return self.model(name)
        ready = [] if asks else [model for model in models if model.is_ready]
        return ready[0] if ready else models[choose("model", [model.name for model in models])]

    def beside(self, main: Model) -> Model | None:
        """Return the smallest model that is in memory together with a larger one; None if there is none."""
        others = [model for model in self.models() if model.is_ready and model.checkpoint != main.checkpoint]
        smaller = [each for each in others if each.writes and main.is_ready and each.load_bytes < main.load_bytes]
        return min(smaller, key=lambda model: model.load_bytes, default=None)

    def models(self) -> list[Model]:
        """Return the models that are served, the default first."""
        models = [Model.of(card) for card in self.entries("/v1/models")]
        if not all(model.name.isprintable() for model in models):
            raise CommandFailed(f"{self.url} serves a model with a line break or control character in its name.")
        if not models:
            raise CommandFailed(f"{self.url} serves no model.")
        return models

    @contextmanager
    def chat(
        self, options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the events of a streamed chat completion. Leaving early closes the connection and cancels the reply."""
        body = {**options, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        with (
            self._client(SILENCE_S) as client,
            self._explained(),
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise CommandFailed(self._refusal(response))
            yield _checked(response.iter_lines())

    def ask(self, path: str, method: str = "GET") -> Any:
        """Send a request without a body. Return the JSON object of its answer."""
        with self._client(self.answer_s) as client, self._explained():
            response = client.request(method, path)
            if response.is_error:
                raise CommandFailed(self._refusal(response))
            try:
                answer = response.json()
            except ValueError as error:
                raise CommandFailed(f"{self.url}{path} did not answer with JSON.") from error
            if not isinstance(answer, dict):
                raise CommandFailed(self._other_program())
            return answer

    def _other_program(self) -> str:
        return f"The program at {self.url} is not vllm-mlx. Give the address of a vllm-mlx server with --url."

    def _client(self, timeout_s: float) -> httpx.Client:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        verify = not self.url.startswith("http://")  # certificates take some time to read
        # A proxy of the environment cannot reach this machine's own addresses.
        trust = not _is_loopback(self.url)
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=trust, verify=verify)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise NoServer(
                f"No server answers at {self.url}. Start one with `vllm-mlx serve MODEL`, "
                "or give its address with --url."
            ) from error
        except httpx.TimeoutException as error:
            raise CommandFailed(f"{self.url} did not answer in time. Is it busy, or another program?") from error
        except httpx.HTTPError as error:
            raise CommandFailed(f"The connection to {self.url} broke: {error or type(error).__name__}.") from error

    def _refusal(self, response: httpx.Response) -> str:
        if response.status_code == 401:
            return f"{self.url} asks for a key: give the right one with --api-key, or set VLLM_MLX_API_KEY."
        if response.status_code == 404 and "error" not in response.text:
            return f"{self.url} has no {response.url.path}: it is another program, or an older version."
        message = None
        with suppress(ValueError):
            message = _error_message(response.json())
        return message or f"{self.url} answered {response.status_code}."


@dataclass(slots=True)
class Reply:
    """A chat completion, as far as it has arrived. All times are of one monotonic clock."""

    started_s: float  # before the connection is made
    moments: list[float] = field(default_factory=list)  # when each part of text or reasoning arrived
    reasoning: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    reply_id: str | None = None
    error: str | None = None

    def feed(self, event: Mapping[str, Any], now_s: float) -> tuple[str, str]:
        """Add an event. Returns the reasoning and the text that it brings."""
        self.usage = event.get("usage") or self.usage
        self.reply_id = self.reply_id or event.get("id")
        reasoning, text = "", ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            text += delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if reasoning or text:
            self.moments.append(now_s)
        self.reasoning += reasoning
        self.text += text
        return reasoning, text

    @property
    def message(self) -> dict[str, Any]:
        """Return the assistant's turn. Reasoning is sent back unchanged, so that the next prompt extends this one."""
        turn = {"role": "assistant", "content": self.text}
        return turn | ({"reasoning_content": self.reasoning} if self.reasoning else {})

    @property
    def num_tokens(self) -> int:
        """Return the server's count of tokens; without one, the number of parts."""
        return int(self.usage.get("completion_tokens") or len(self.moments))

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def num_cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def find_server(url: str | None, api_key: str | None, *, as_admin: bool = False, answer_s: float = ANSWER_S) -> Remote:
    """Return the server at `url`, or the one that `serve` would start with the settings of this machine.

    A key from the settings is sent to this machine only; `as_admin` prefers an admin key.
    Raises WrongUsage, ConfigError.
    """
    settings = server_settings()
    if url is None:
        if settings.port == 0:
            raise WrongUsage("The port is set to 0, which takes any free one: give the server's address with --url.")
        url = local_url(settings.host, settings.port)
    url = _normalised(url)
    if api_key is None and _is_loopback(url):
        keys = sorted(settings.keys, key=lambda key: key.is_admin is not as_admin)
        api_key = next((key.secret for key in keys if as_admin or not key.is_admin), None)
    return Remote(url, api_key, answer_s)


def _normalised(url: str) -> str:
    """Return the address with a scheme, and without the `/v1` that clients need. Raises WrongUsage."""
    parts = http_url(url if "://" in url else f"http://{url}")
    if parts is None:
        raise WrongUsage(f"--url {url} is not an address: write it as http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_loopback(url: str) -> bool:
    return is_local(urlsplit(url).hostname or "")


def _error_message(body: Any) -> str | None:
    """Return the message of an error in the form of any of the protocols, or None for other data."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else None


def _checked(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Raises CommandFailed for an event that reports an error, and for broken data."""
    try:
        for event in events_of(lines):
            if message := _error_message(event):
                raise CommandFailed(message)
            yield event
    except ValueError as error:
        raise CommandFailed("The server sent an event that is not a JSON object.") from error


def event_of(line: str) -> dict[str, Any] | None:
    """Return the object on one line of a stream, or None for blank lines, comments, names of events and `[DONE]`.

    Raises ValueError for data that is not a JSON object.
    """
    name, _, data = line.partition(":")
    if name != "data" or data.strip() == "[DONE]":
        return None
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event is not a JSON object: {data[:80]}")
    return event


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects on the lines of a stream. Raises ValueError for data that is not a JSON object."""
    return (event for line in lines if (event := event_of(line)) is not None)
