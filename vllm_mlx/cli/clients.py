"""The clients that `launch` knows, and how each is set up. Starts nothing. docs/clients has a page for each.

clients.toml describes them with templates: `{model}` and the other names of `Target.values` have the server's values.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..util.json_values import with_texts
from ..util.private_file import write_private
from .remote import Model
from .terminal import CommandFailed, one_line

_CONTINUE = {"tools": "tool_use", "images": "image_input"}  # its words for capabilities
_ROLES = {"embedding": ("embed", "openai"), "rerank": ("rerank", "cohere")}  # by task: its role, and its provider
_FILLS_IN = ("autocomplete", "openai")
# Continue chooses the template of completions by the model's name; with these the template fits the model.
_FILL_IN_NAMES = re.compile(r"(?i)qwen.*coder(?!-next)|starcoder|codestral|codellama|deepseek.*coder|granite.*code")
NO_KEY = "none"  # the key that clients send to a server that needs none


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a client is set up for."""

    url: str  # without /v1
    model: Model
    context: int  # tokens of prompt and reply
    api_key: str  # `NO_KEY` if the server needs none
    folder: Path  # where `launch` writes its own files
    small: Model | None = None  # for titles and summaries; None: the same model
    roles: Mapping[tuple[str, str], str] = field(default_factory=dict)  # of Continue: see `roles_of`

    @property
    def max_reply(self) -> int:
        return _max_reply(self.context)

    def _models(self) -> Iterator[tuple[str, int, frozenset[str]]]:
        """Yield name, context and capabilities of the main model, then of the small one if there is one."""
        yield self.model.name, self.context, self.model.capabilities
        if self.small is not None:
            yield self.small.name, self.small.max_model_len or self.context, self.small.capabilities

    def _continue_roles(self) -> Iterator[str]:
        for (role, provider), model in self.roles.items():
            own = {"name": f"{model}, {role}", "provider": provider, "model": model, "roles": [role]}
            yield f"\n  - {_json(own | {'apiBase': f'{self.url}/v1', 'apiKey': self.api_key})}"

    def values(self) -> Mapping[str, str]:
        """Return the values of the names in clients.toml."""
        capabilities = self.model.capabilities
        return {
            "url": self.url,
            "base_url": f"{self.url}/v1",
            "model": self.model.name,
            "small": (self.small or self.model).name,
            "opencode_models": _json({name: _for_opencode(size, has) for name, size, has in self._models()}),
            "aider_models": _json(
                {f"openai/{name}": _for_aider(size, has) for name, size, has in self._models()}, indent=2
            ),
            "images": _json("images" in capabilities),
            "no_images": _json("images" not in capabilities),
            "modalities": _json(_modalities(capabilities)),
            "tools": _json("tools" in capabilities),
            "reasons": _json("reasoning" in capabilities),
            "continue_capabilities": _json([_CONTINUE[each] for each in _CONTINUE if each in capabilities]),
            "continue_roles": "".join(self._continue_roles()),
            "context": str(self.context),
            "max_prompt": str(self.context - self.max_reply),
            "max_reply": str(self.max_reply),
            "key": self.api_key,
            "folder": str(self.folder),
            "web_search": "live" if self.model.searches else "disabled",
        }


def roles_of(models: Iterable[Model]) -> dict[tuple[str, str], str]:
    """Return the first model for each role of Continue except chats, by the role and its provider."""
    found: dict[tuple[str, str], str] = {}
    for model in models:
        fills_in = _FILLS_IN if model.writes and _FILL_IN_NAMES.search(model.name) else None
        if role := _ROLES.get(model.task, fills_in):
            found.setdefault(role, model.name)
    return found


def _json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _max_reply(context: int) -> int:
    """Return tokens that clients keep free for a reply: a quarter of the context, at most 32,000."""
    return max(1, min(32_000, context // 4))


def _modalities(capabilities: frozenset[str]) -> list[str]:
    return ["text", "image"] if "images" in capabilities else ["text"]


def _for_opencode(context: int, capabilities: frozenset[str]) -> dict[str, Any]:
    """Describe a model in the settings of opencode and Kilo Code."""
    return {
        "limit": {"context": context, "output": _max_reply(context)},
        "attachment": "images" in capabilities,
        "modalities": {"input": _modalities(capabilities), "output": ["text"]},
        "reasoning": "reasoning" in capabilities,
        "tool_call": "tools" in capabilities,
    }


def _for_aider(context: int, capabilities: frozenset[str]) -> dict[str, Any]:
    reply = _max_reply(context)
    return {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": context - reply,
        "max_output_tokens": reply,
        "max_tokens": reply,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "supports_vision": "images" in capabilities,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Installation, set-up and start of a client. Its texts are templates until `for_server` fills them."""

    title: str
    install: str = ""
    program: str = ""  # empty: one that takes its models only from its own settings
    sign_in: Sequence[str] = ()  # arguments of a run before the client's, which signs in
    flags: Sequence[str] = ()
    mode: Sequence[str] = ()  # flags that choose the mode in which it asks before it acts
    mode_flags: Sequence[str] = ()  # flags of the user that choose a mode
    default_arguments: Sequence[str] = ()  # the last arguments, if the user gives none
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()  # variables that would override these
    files: Mapping[str, str] = field(default_factory=dict)  # texts by path below the target's folder
    first_prompt: int = 0  # about how many tokens the client's first prompt has
    least_context: int = 0  # tokens without which the client does not start
    key_warning: str = ""  # a warning before the client starts, if the server has a key
    has_small_roles: bool = False  # whether it has small tasks for a separate model
    next_step: str = ""  # the steps for the user if `launch` cannot start the client

    def for_server(self, target: Target) -> "Client":
        """Fill the templates for a server."""
        client = Client(**_filled(asdict(self), target.values()))
        files = {str(target.folder / path): text for path, text in client.files.items()}
        return replace(client, files=files, key_warning="" if target.api_key == NO_KEY else client.key_warning)

    def runs(self, arguments: Sequence[str] = ()) -> list[list[str]]:
        """Return the commands to run. The last one is the client itself, with the user's `arguments`."""
        if not self.program:
            return []
        before = [[self.program, *self.sign_in]] if self.sign_in else []
        is_chosen = any(argument.partition("=")[0] in self.mode_flags for argument in arguments)
        mode = () if is_chosen else self.mode
        return [*before, [self.program, *self.flags, *mode, *(arguments or self.default_arguments)]]

    def script(self, title: str, arguments: Sequence[str] = ()) -> str:
        """Return a shell script that does the same as `launch`."""
        lines = [f"# {one_line(comment)}" for comment in (title, self.key_warning) if comment]
        for path, text in self.files.items():  # only their owner may read them, as with `write_own`
            lines += ["(", "umask 077", f"mkdir -p {shlex.quote(str(Path(path).parent))}"]
            lines += [f"cat > {shlex.quote(path)} <<'END'", text.rstrip("\n"), "END", ")"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f"unset {name}" for name in self.unset]
        return "\n".join([*lines, *map(shlex.join, self.runs(arguments))]) + "\n"


_NAME = re.compile(r"\{([a-z_]+)\}")


def _filled(template: Any, values: Mapping[str, str]) -> Any:
    """Replace the names in the texts of a template. Between double quotes, values are escaped as JSON asks."""
    quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}

    def fill(text: str) -> str:
        parts = text.split('"')
        parts[::2] = [_with_values(part, values) for part in parts[::2]]
        parts[1::2] = [_with_values(part, quoted) for part in parts[1::2]]
        return '"'.join(parts)

    return with_texts(template, fill)


def _with_values(text: str, values: Mapping[str, str]) -> str:
    return _NAME.sub(lambda name: values[name[1]], text)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CLIENTS: Mapping[str, Client] = {name: Client(**row) for name, row in _TABLE.items()}


def write_own(path: Path, text: str) -> None:
    """Write a file as a whole. Only its owner may read it, because it may hold a key. Raises CommandFailed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, text.encode())
    except OSError as error:
        raise CommandFailed(f"Cannot write {path}: {error.strerror}.") from error
