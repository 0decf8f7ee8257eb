"""A client's request, the same for every protocol: the form that it demands of its reply, and limits on its size.

It knows no wire format, no grammar library and no tokenizer.
"""

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import Field

from .config import DOCUMENTED, SamplingDefaults, SettingsGroup
from .errors import InvalidParameter, setting, shown
from .messages import Message, ToolChoice, ToolSpec

MAX_GUIDE_CHARS = 256 * 1024
_LAST_RESORT = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
_CHECKPOINT_RANGES = {
    "temperature": (0, 2), "top_p": (1e-9, 1), "min_p": (0, 1), "repetition_penalty": (1e-9, math.inf),
}  # fmt: skip
_GREEDY_TEMPERATURE = 1e-5  # dividing logits by a lower temperature overflows
_SEED_BITS = 63
MAX_CHOICES = 4096
MAX_TEXTS = 2048  # of one request to an encoder
MAX_STRUCTURES = 1024  # structures, and triggers, of a structural tag: each pair is compared
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**17  # of one request: tokens of its prompts, each with its likeliest ones
MAX_CACHE_SALT = 1024  # characters; the salt is part of many keys
MAX_INTEGER = 2**63 - 1
ROW_IDS = 1 << 16  # ids of sequences for one reply: its own, and those of the rows that read its documents
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1_000  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1_000
MAX_LOGIT_BIAS = 300
# The server sets these arguments of the chat template. From a client they would change the meaning of other fields.
RESERVED_TEMPLATE_KWARGS = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON text that is valid under the schema."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches from its first to its last character."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text that the grammar derives; `text` is the grammar in Lark's notation or in GBNF."""

    text: str


@dataclass(frozen=True, slots=True)
class TagStructure:
    """The text `begin`, content that is valid under the schema, and the text `end`."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text in which a trigger always begins one of the structures."""

    structures: tuple[TagStructure, ...]
    triggers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StructuralFormat:
    """The newer form of a structural tag: a tree of `{"type": …}` that describes the complete reply."""

    format: Mapping[str, Any]


GuideForm = JsonSchema | Regex | Choice | Grammar | StructuralTag | StructuralFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A demanded form and its request field, `param`. Raises InvalidParameter, which names that field."""

    form: GuideForm
    param: str = "structured_outputs"
    in_reasoning: bool = False  # True: it also binds the reasoning before the answer

    def __post_init__(self) -> None:
        match self.form:
            case Choice(options):
                self._check(bool(options), "needs at least one option")
                self._check(len(options) <= MAX_CHOICES, f"takes at most {MAX_CHOICES} options")
                self._check(all(options), "takes no empty option")
                self._check_size(sum(map(len, options)))
            case Regex(text) | Grammar(text):
                self._check(bool(text), "must not be empty")
                self._check_size(len(text))
            case StructuralTag(structures, triggers):
                self._check(bool(structures), "needs at least one structure")
                self._check(bool(triggers) and all(triggers), "needs at least one trigger, none of them empty")
                self._check(len(structures) <= MAX_STRUCTURES, f"takes at most {MAX_STRUCTURES} structures")
                self._check(len(triggers) <= MAX_STRUCTURES, f"takes at most {MAX_STRUCTURES} triggers")
                for structure in structures:
                    is_triggered = structure.begin.startswith(triggers)
                    self._check(is_triggered, f"has no trigger that begins the structure '{shown(structure.begin)}'")

    def _check_size(self, num_chars: int) -> None:
        self._check(num_chars <= MAX_GUIDE_CHARS, f"takes at most {MAX_GUIDE_CHARS} characters")

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidParameter(f"`{self.param}` {rule}.", param=self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of the tokens. A field that is None takes the server's default, then the checkpoint's.

    Raises InvalidParameter, which names the field, for a value outside its range.
    """

    max_tokens: int | None = None  # None: up to the context window
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None  # 0: off
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None  # 1: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: no log probabilities; k: of the sampled token and the k likeliest
    guide: Guide | None = None  # the form that the reply must have
    thinking_token_budget: int | None = None  # tokens after which reasoning ends; None or -1: no limit

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # a single text, which would otherwise be read as a list of letters
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:  # vLLM's word for off
            object.__setattr__(self, "top_k", 0)
        _check_range("max_tokens", self.max_tokens, 0, None, is_whole=True)
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("top_k", self.top_k, 0, None, is_whole=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("repetition_penalty", self.repetition_penalty, 0, None, open_low=True)
        _check_range("n", self.n, 1, 128, is_whole=True)
        _check_range("min_tokens", self.min_tokens, 0, None, is_whole=True)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS, is_whole=True)
        _check_range("seed", self.seed, -(2**63), 2**64 - 1, is_whole=True)
        _check_number("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_number("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, None, is_whole=True)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100, 100)
        check_stop("stop", self.stop)
        check_budget(self.thinking_token_budget, "thinking_token_budget")
        if self.guide is not None and self.ignore_eos:
            raise InvalidParameter(
                f"`ignore_eos` does not go with `{self.guide.param}`: a guided reply ends where it is complete.",
                param="ignore_eos",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"`min_tokens` ({self.min_tokens}) must not exceed `max_tokens` ({self.max_tokens}).",
                param="min_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """Texts for an encoder, which computes a vector of each. With a `query`, it scores each as a document."""

    texts: tuple[str | tuple[int, ...], ...]  # each a text or its token ids
    query: str | None = None
    instruction: str | None = None  # of a causal reranker; None: the checkpoint's
    prompt_name: str | None = None  # one of the checkpoint's prompts; None: its default
    dimensions: int | None = None  # length to which each vector is cut; None: it is not
    truncate: bool = False  # cut inputs that are too long, rather than refuse them


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """SamplingParams with every default resolved, as the sampler reads them for one row.

    A field with the name of a field of SamplingParams takes its value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # drawn at random if the client gave none
    num_top_logprobs: int | None = None
    read_ids: tuple[int, ...] = ()  # tokens instead of the likeliest ones, the same for all rows of a model

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    tokens: TokenSampling
    max_tokens: int
    clamped_max_tokens: int | None  # set if the context window is smaller than the client's limit
    min_tokens: int
    stop_token_ids: frozenset[int]


def checkpoint_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """Read generation_config.json. Sampling is greedy if `do_sample` is false and no temperature is given.

    Other values count even if `do_sample` is false. A value that a request may not have is left out.
    """
    found: dict[str, Any] = {
        name: float(value)
        for name, (low, high) in _CHECKPOINT_RANGES.items()
        if isinstance(value := config.get(name), int | float) and low <= value <= high
    }
    if isinstance(top_k := config.get("top_k"), int):
        found["top_k"] = max(0, top_k)
    if config.get("do_sample") is False and config.get("temperature") is None:
        found["temperature"] = 0.0
    return SamplingDefaults(**found)


def usual_sampling(defaults: SamplingDefaults, checkpoint: SamplingDefaults) -> dict[str, float]:
    """Return the temperature and the top_p of requests that give none."""
    filled = _filled_in(defaults, checkpoint, _LAST_RESORT)
    return {name: filled[name] for name in ("temperature", "top_p")}


def resolve_sampling(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
    checkpoint: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
) -> ResolvedSampling:
    """Resolve every setting. The prompt must fit the context window.

    Raises InvalidParameter for a `logit_bias` outside the vocabulary.
    """
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"`logit_bias` names the token id {token_id}; this model's ids are 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
    room = max_model_len - num_prompt_tokens
    assert room > 0
    asked = params.max_tokens if params.max_tokens is not None else defaults.max_tokens
    max_tokens = room if asked is None else min(asked, room)
    is_clamped = params.max_tokens is not None and params.max_tokens > room
    given = {each.name: getattr(params, each.name) for each in fields(TokenSampling) if hasattr(params, each.name)}
    given |= _filled_in(params, defaults, checkpoint, _LAST_RESORT)
    given["seed"] = (secrets.randbits(_SEED_BITS) if params.seed is None else params.seed) % 2**64
    return ResolvedSampling(
        tokens=TokenSampling(**given, num_top_logprobs=params.logprobs),
        max_tokens=max_tokens,
        clamped_max_tokens=max_tokens if is_clamped else None,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(eos_token_ids)),
    )


def _filled_in(*sources: SamplingParams | SamplingDefaults) -> dict[str, Any]:
    """Take each setting from the first source that has it."""
    names = [each.name for each in fields(SamplingDefaults) if each.name != "max_tokens"]
    return {name: next(value for source in sources if (value := getattr(source, name)) is not None) for name in names}


def check_stop(name: str, stop: Sequence[str]) -> None:
    """Raise InvalidParameter, which names the field, for stop strings that exceed a limit."""
    _check_number(name, stop, MAX_STOP_STRINGS)
    if not all(stop):
        raise InvalidParameter(f"`{name}` must not contain an empty string.", param=name)
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidParameter(f"`{name}` takes strings of at most {MAX_STOP_CHARS} characters.", param=name)


def check_budget(budget: Any, name: str) -> None:
    """Raise InvalidParameter, which names the field, unless `budget` is a number of tokens, -1 or None."""
    if budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and -1 <= budget <= MAX_INTEGER):
        return
    raise InvalidParameter(f"`{name}` must be a non-negative integer or -1 for unlimited.", param=name)


def _check_number(name: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise InvalidParameter(f"`{name}` takes at most {most} entries, got {len(items)}.", param=name)


def _check_range(
    name: str, value: Any, low: float | None, high: float | None, *, open_low: bool = False, is_whole: bool = False
) -> None:
    if value is None:
        return
    is_number = isinstance(value, Integral if is_whole else Real)
    if not is_number:
        raise InvalidParameter(f"`{name}` must be {'an integer' if is_whole else 'a number'}.", param=name)
    if isinstance(value, int):
        high = MAX_INTEGER if high is None else high
    elif not math.isfinite(value):
        raise InvalidParameter(f"`{name}` must be a finite number.", param=name)
    if low is not None and (value <= low if open_low else value < low):
        raise InvalidParameter(
            f"`{name}` must be {'greater than' if open_low else 'at least'} {low}, got {shown(str(value))}.", param=name
        )
    if high is not None and value > high:
        raise InvalidParameter(f"`{name}` must be at most {high}, got {shown(str(value))}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Exactly one of `messages`, `prompt` and `texts` is set."""

    request_id: str
    messages: tuple[Message, ...] | None = None  # the messages of a chat
    prompt: str | tuple[int, ...] | None = None  # the prompt of a text completion: text or token ids
    suffix: str = ""  # of a text completion: the text after the one to generate, for models that can fill in
    texts: TextInputs | None = None  # for an encoder, which generates nothing
    prediction: str = ""  # a text that the reply may repeat: the reply is the same, and may come sooner
    tools: tuple[ToolSpec, ...] = ()
    unlisted_tools: tuple[ToolSpec, ...] = ()  # callable, but not listed in the prompt
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    max_tool_calls: int | None = None  # 1: the reply ends after its first tool call
    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: Literal["auto", "on", "off"] = "auto"
    thinking_limit: int | None = None  # like the sampling budget, but ignored by models that do not reason
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # none of RESERVED_TEMPLATE_KWARGS
    fills_content: bool | None = None  # reasoning is also content if the reply has no other; None: as for the family
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False  # only in a text completion: the reply begins with the prompt's text
    max_prompt_logprobs: int = 0  # log-probabilities of an echoed prompt; 0: none
    counts: bool = False  # whether the stream counts the tokens before each delta
    keeps_reasoning: bool | None = None  # in the prefix cache, for any next turn; None: as the server is set
    cache_salt: str = ""  # requests of different salts never share cached state
    tenant: str = ""  # digest of the API key that sent the request; empty without keys
    arrived_s: float | None = None  # by the monotonic clock; None: the time of its submission
    client: str | None = None  # the name that the client gives itself; only the status shows it
    path: str = ""  # the endpoint that got the request
    model: int = 0  # the position of its model in the list of models

    def __post_init__(self) -> None:
        """Refuse an empty reply, and two tools of one name, since no call could say which. Raises InvalidParameter."""
        if self.sampling.max_tokens == 0 and not self.echo:
            raise InvalidParameter("`max_tokens` must be at least 1; with `echo` it may be 0.", param="max_tokens")
        by_name: dict[str, ToolSpec] = {}
        for tool in (*self.tools, *self.unlisted_tools):
            if (other := by_name.setdefault(tool.name, tool)) is not tool:
                raise InvalidParameter(
                    f"`{other.name_param}` and `{tool.name_param}` are two tools of one name, `{shown(tool.name)}`. "
                    "Rename one of them, or leave it out.",
                    param=tool.name_param,
                )


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENTED)
class RequestLimits(SettingsGroup):
    """Limits on the size of one request, the same for every protocol."""

    max_messages: int = Field(default=10_000, gt=0)
    """Messages of one request."""
    max_tools: int = Field(default=1024, gt=0)
    """Tools of one request."""
    max_schema_bytes: int = Field(default=256 * 1024, gt=0)
    """Size of one JSON schema, of a tool or of a reply, in bytes."""
    max_choices: int = Field(default=1024, gt=0)
    """Replies to one request: `n` for each of its prompts."""

    def check(self, request: Request) -> None:
        """Raise InvalidParameter, naming the limit."""
        self.check_messages(len(request.messages or ()))
        _at_most(len(request.tools) + len(request.unlisted_tools), self.max_tools, "max_tools")
        for param, schema in _schemas(request):
            if schema and _is_longer(schema, self.max_schema_bytes):
                raise InvalidParameter(
                    f"A JSON schema in `{param}` is longer than {self.max_schema_bytes} bytes "
                    f"({setting('max_schema_bytes')}).",
                    param=param,
                )

    def check_messages(self, num_messages: int) -> None:
        """Raise InvalidParameter, naming the limit."""
        _at_most(num_messages, self.max_messages, "max_messages")

    @staticmethod
    def check_texts(num_texts: int, param: str) -> None:
        """Raise InvalidParameter, naming the limit."""
        if num_texts > MAX_TEXTS:
            message = f"`{param}` has {num_texts} texts, and a request has at most {MAX_TEXTS}. Send several requests."
            raise InvalidParameter(message, param=param)

    def check_choices(self, num_choices: int) -> None:
        """Raise InvalidParameter, naming the limit."""
        _at_most(num_choices, self.max_choices, "max_choices", param="n")


def _at_most(number: int, limit: int, name: str, param: str | None = None) -> None:
    if number > limit:
        noun = name.removeprefix("max_")
        message = f"This request has {number} {noun}; the server takes at most {limit} ({setting(name)})."
        raise InvalidParameter(message, param=param or noun)


def _is_longer(schema: Any, max_bytes: int) -> bool:
    """Return whether the schema has more than `max_bytes` as JSON, which is only written if its texts fit."""
    num_bytes, left = 0, [schema]
    while left and num_bytes <= max_bytes:
        value = left.pop()
        num_bytes += len(value) + 2 if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return num_bytes > max_bytes or len(json.dumps(schema)) > max_bytes


def _schemas(request: Request) -> Iterator[tuple[str, Any]]:
    for tool in (*request.tools, *request.unlisted_tools):
        yield "tools", tool.parameters
    match request.sampling.guide:
        case Guide(form=JsonSchema(schema) | StructuralFormat(schema), param=param):
            yield param, schema
        case Guide(form=StructuralTag(structures), param=param):
            for structure in structures:
                yield param, structure.schema
