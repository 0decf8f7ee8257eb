"""Every error that a user can see. Its message says what to change.

VLLMMLXError
├── ConfigError            a flag, file or machine that cannot serve: exit code 1 before the server starts
│   └── ModelLoadError     the checkpoint cannot be loaded
├── RequestError           the client's request is at fault; nothing was generated
│   ├── InvalidParameter   a value outside its range
│   ├── Unsupported        a field this server refuses to ignore
│   ├── InvalidImage       an image that cannot be fetched or decoded, or exceeds a limit
│   │   ├── InvalidVideo   the same for a video
│   │   └── InvalidDocument  the same for a document
│   ├── ContextLengthExceeded
│   ├── TemplateError      the chat template cannot render this conversation
│   ├── ModelNotFound
│   ├── ModelBusy          weights that are in use cannot be unloaded
│   ├── ResponseNotFound   the response that the request continues is not stored on this server
│   ├── ItemNotFound       the same for an item that it refers to
│   ├── TimeLimit          the request took longer than the server allows
│   └── Overloaded         the client may try again after `retry_after_s`
│       ├── ShuttingDown   the server ends, and has refused the request or cut its reply
│       ├── ModelUnavailable  the weights could not be loaded again, or have no room
│       └── TooManyRequests  this client, or all clients together, sent too many requests
└── GenerationError        this generation failed on the server; others continue
    ├── GrammarLimit       the client's grammar takes more time than one reply may use
    ├── Cancelled          cancelled through the API, not by disconnecting
    └── EngineDead         the engine thread has ended
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_SHOWN = 80  # characters of a name that a client chose


def shown(name: str) -> str:
    """Return a client's name or value, cut to a length that fits an error message."""
    return name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…"


def shown_field(name: str) -> str:
    """Return a client's field name as a path shows it: in quotes if empty or with spaces or control characters."""
    name = shown(name)
    return name if name and name.isprintable() and " " not in name else json.dumps(name, ensure_ascii=False)


def setting(name: str) -> str:
    """Return a setting's name for messages: as the user writes it on the command line."""
    return "--" + name.replace("_", "-")


def first_line(error: Exception, max_chars: int | None = None) -> str:
    """Return the first line of a library's error, for use in our message; its type if it has no text.

    A line that ends with a colon announces names, of which the first two are added.
    """
    if type(error) is KeyError:
        return f"the key {error} is missing"[:max_chars]
    first, *names = str(error).strip().splitlines() or [type(error).__name__]
    if names and first.rstrip().endswith(":"):
        first = " ".join([first.rstrip(), *names[:2]]).rstrip(",") + (" …" if names[2:] else "")
    return first[:max_chars]


class VLLMMLXError(Exception):
    """Base class of all errors that this project raises on purpose."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class ConfigError(VLLMMLXError):
    pass


class ModelLoadError(ConfigError):
    pass


@contextmanager
def about(model: str | None) -> Iterator[None]:
    """Add the name of the model to a ConfigError of the block. None if there is only one model."""
    try:
        yield
    except ConfigError as error:
        if model is None:
            raise
        raise type(error)(f"{model}: {error.message}") from error


class RequestError(VLLMMLXError):
    """`param` is the request field at fault. `code` is a stable word for programs."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidParameter(RequestError):
    code = "invalid_value"


class Unsupported(RequestError):
    code = "unsupported_parameter"


class InvalidImage(RequestError):
    code = "invalid_image"

    def __init__(self, message: str, *, param: str = "messages"):
        super().__init__(message, param=param)


class InvalidVideo(InvalidImage):
    code = "invalid_video"


class InvalidDocument(InvalidImage):
    code = "invalid_document"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"

    def __init__(self, *, num_prompt_tokens: int, max_model_len: int, is_least: bool = False, param: str = "messages"):
        """`param`: the request field that holds the prompt. `is_least`: the count is a lower bound, and the prompt was
        not tokenised.
        """
        count = f"at least {num_prompt_tokens}" if is_least else f"{num_prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {count} "
            "tokens and at least one is needed for the reply. Please shorten the prompt.",
            param=param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.is_least = is_least


class TemplateError(RequestError):
    code = "template_error"


class ModelNotFound(RequestError):
    code = "model_not_found"


class ResponseNotFound(RequestError):
    code = "previous_response_not_found"


class ItemNotFound(RequestError):
    pass


class Overloaded(RequestError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(Overloaded):
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", retry_after_s=5)


class ModelUnavailable(Overloaded):
    code = "model_unavailable"


class TooManyRequests(Overloaded):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float):
        # Some clients read the time from the text of an error inside a stream, which has no headers.
        super().__init__(f"{message} Please try again in {math.ceil(retry_after_s)}s.", retry_after_s=retry_after_s)


class ModelBusy(RequestError):
    code = "model_busy"


class TimeLimit(RequestError):
    code = "request_timeout"


class GenerationError(VLLMMLXError):
    pass


class GrammarLimit(GenerationError):
    """The client's grammar is too expensive. `param` is the request field that asks for it."""

    code = "grammar_limit"

    def __init__(self, message: str, *, param: str):
        super().__init__(message)
        self.param = param


class Cancelled(GenerationError):
    def __init__(self) -> None:
        super().__init__("This request was cancelled on the server.")


class EngineDead(GenerationError):
    pass
