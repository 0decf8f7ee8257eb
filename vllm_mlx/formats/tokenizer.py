"""Text ↔ token ids of one checkpoint. Wraps the tokenizer that transformers loads; threads may share it."""

import ctypes
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from ..core.errors import ModelLoadError, TemplateError, first_line
from .remote_code import remote_code

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_MAX_ID = 2**32 - 1
# A template is a program. Besides Jinja's own errors, it raises Python's errors for values that it did not expect.
TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                     RecursionError, MemoryError)  # fmt: skip
TEMPLATE_S = 10.0  # seconds for one rendering: a template is a program that came with the checkpoint
MAX_RENDERED_CHARS = 1 << 26
LONG_CHARS = 4096  # longer texts are encoded as a batch of one: only for batches is the interpreter's lock released
_UNFINISHED = "\ufffd"  # a decoder writes it for the bytes of an incomplete character
_MAX_CONTEXT = 8
_MAX_PENDING = 16  # no character needs this many tokens, so these bytes are not text
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class AddedTokens:
    """A tokenizer's added tokens, text to id, and the search for them. Some have 6,000, so this is made once."""

    def __init__(self, ids: Mapping[str, int]):
        self.ids = ids
        self.texts = frozenset(ids)
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def parts(self, text: str) -> list[str]:
        """Split `text` into tokens and the plain text between them."""
        return [part for part in self._pattern.split(text) if part] if self._pattern else [text] if text else []


class Tokenizer:
    """A checkpoint's tokenizer and chat template. `text in tokenizer`: the text is one token of the vocabulary."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: Iterable[int] = (), chat_template: str | None = None):
        self.hf = hf_tokenizer  # the tokenizer of transformers
        self.backend: tokenizers.Tokenizer = hf_tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        own_eos = hf_tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if own_eos is None else {own_eos})
        self._template_override = chat_template
        self._added: dict[int, tuple[str, bool]] = {
            token_id: (token.content, token.special)
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.content.replace("▁", " ").strip()  # added runs of white space are plain text
        }
        self.added = AddedTokens({text: token_id for token_id, (text, _) in self._added.items()})
        self.marker_tokens = self.added.texts
        self.vocab_size: int = max(
            self.backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1
        )
        self.decoder_types = frozenset(step["type"] for step in steps_of(self.backend.decoder))
        self.token_bytes = lru_cache(1 << 18)(self._token_bytes)  # one reply may name half as many

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> "Tokenizer":
        """Load from a checkpoint's folder. `chat_template` is a text that replaces its own. Raises ModelLoadError."""
        from transformers import AutoTokenizer

        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelLoadError(f"{path} has no tokenizer: put the checkpoint's tokenizer.json beside its weights.")

        def failed(error: Exception) -> ModelLoadError:
            try:
                for file in sorted(path.glob("[!.]*.json")):
                    read_json(file)  # its error names a damaged file
            except ModelLoadError as damage:
                error = damage
            return ModelLoadError(f"The tokenizer in {path} cannot be loaded: {first_line(error)}")

        with remote_code(path, "tokenizer", trusted=trust_remote_code, failed=failed):
            hf_tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            take_parts_of_file(hf_tokenizer, path)
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelLoadError(f"The tokenizer in {path} has no fast form: convert it to a tokenizer.json.")
        eos = [*_eos_ids(path / "generation_config.json"), *_eos_ids(path / "config.json")]
        if chat_template is None and not hf_tokenizer.chat_template:
            chat_template = read_json(path / "chat_template.json").get("chat_template")  # processors keep it there
        return cls(hf_tokenizer, eos_token_ids=eos, chat_template=chat_template)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.backend.token_to_id(text) is not None

    @property
    def chat_template(self) -> str | None:
        """Return the text of the chat template, if it writes messages. The texts of several templates are joined."""
        template: str | dict[str, str] | None = self._template_override
        if template is None:
            template = self.hf.chat_template
        if isinstance(template, dict):
            template = "\n".join(template.values())
        return template if template and "{" in template else None

    @property
    def response_template(self) -> Any:
        """The checkpoint's own rules for reading replies, as its files write them; None if it has no such rules."""
        given = getattr(self.hf, "response_template", None)
        return getattr(self.hf, "init_kwargs", {}).get("response_template") if given is None else given

    def template_fault(self) -> str | None:
        """Return the error of the chat template, rendered once for one empty message; None if Jinja can read it."""
        if self.chat_template is None:
            return "it writes no messages"
        try:
            self.apply_chat_template([{"role": "user", "content": ""}])
        except jinja2.TemplateSyntaxError as error:
            return f"line {error.lineno}: {first_line(error).rstrip('.')}"
        except (*TEMPLATE_FAILURES, TemplateError):
            return None  # It may want other messages.
        return None

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """Render a conversation. Empties `messages`.

        Raises one of `TEMPLATE_FAILURES`, and TemplateError if rendering takes too long or makes too long a text.
        """
        try:
            with time_limit(TEMPLATE_S):
                text: str = self.hf.apply_chat_template(
                    messages, chat_template=self._template_override, tokenize=False, **kwargs
                )
        except OutOfTime:
            message = f"The model's chat template took more than {TEMPLATE_S:g} seconds for this conversation."
            raise TemplateError(message, param="messages") from None
        finally:
            messages.clear()  # a template's macros are in reference cycles that would keep them alive
        if len(text) > MAX_RENDERED_CHARS:
            message = f"The model's chat template made more than {MAX_RENDERED_CHARS} characters of this conversation."
            raise TemplateError(message, param="messages")
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. `add_special_tokens`: with those that the tokenizer puts around it, such as BOS."""
        if len(text) < LONG_CHARS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encoding(self, text: str) -> tokenizers.Encoding:
        """Return the ids of a text with its special tokens written out, and the characters of each id."""
        if len(text) < LONG_CHARS:
            return self.backend.encode(text, add_special_tokens=False)
        return self.backend.encode_batch([text], add_special_tokens=False)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Unknown ids are left out."""
        known = [token_id for token_id in token_ids if 0 <= token_id <= _MAX_ID]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def added_token(self, token_id: int) -> tuple[str, bool] | None:
        """Return (text, special) of a token that was added to the learned vocabulary, else None.

        `special`: the tokenizer declares the token not to be part of any text, so it is left out of replies.
        """
        return self._added.get(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token. They may end inside a character."""
        if (added := self._added.get(token_id)) is not None:
            return added[0].encode()
        token = self.backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None
        if token is None:
            return b""
        if "ByteFallback" in self.decoder_types and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match.group(1))
        if "ByteLevel" in self.decoder_types and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        return token.replace("▁", " ").encode() if {"Metaspace", "Replace"} & self.decoder_types else token.encode()

    def token_text(self, token_id: int) -> str:
        """Return the token's text, in which the bytes of incomplete characters become replacement characters."""
        return self.token_bytes(token_id).decode(errors="replace")


def take_parts_of_file(hf_tokenizer: Any, path: Path) -> None:
    """Make a tokenizer of transformers give the ids that the checkpoint's tokenizer.json gives.

    For some classes, Transformers 5 takes only the vocabulary from the file, and makes the other parts in code.
    """
    file, is_fast = path / "tokenizer.json", getattr(hf_tokenizer, "is_fast", False)
    if is_fast and type(hf_tokenizer).__module__.startswith("transformers.models.") and file.is_file():
        exact, backend = tokenizers.Tokenizer.from_file(str(file)), hf_tokenizer.backend_tokenizer
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            setattr(backend, part, getattr(exact, part))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply's text, and the number of its tokens."""

    text: str
    num_tokens: int
    special: bool = False  # it is the complete text of one added token
    control: bool = False  # the tokenizer declares that this token is not part of any text


class Detokenizer:
    """Turns ids into pieces of text, which are together the decoded reply. Incomplete characters are held back.

    The end of the prompt is decoded with the reply, so that a space at its start is kept. No id raises an error.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._context: list[int] = []
        self._set_context(context_ids(tokenizer, prompt_token_ids))
        self._pending: list[int] = []

    def feed(self, token_id: int) -> list[Piece]:
        added = self._tokenizer.added_token(token_id)
        if added is not None:
            pieces = self.finish()
            self._set_context([token_id])
            text, control = added
            return [*pieces, Piece(text, 1, special=True, control=control)]
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if len(text) > self._context_length and (text[-1] != _UNFINISHED or len(self._pending) >= _MAX_PENDING):
            return [self._emit(text)]
        return []

    def finish(self) -> list[Piece]:
        """Return the text that was held back. Incomplete characters become replacement characters."""
        if not self._pending:
            return []
        return [self._emit(self._decode(self._context + self._pending))]

    def _emit(self, text: str) -> Piece:
        piece = Piece(text[self._context_length :], len(self._pending))
        if piece.text:
            self._set_context(self._pending)
        self._pending = []
        return piece

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_length = len(self._decode(token_ids))


def context_ids(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the prompt's shortest end, at most `_MAX_CONTEXT` ids, whose text ends with a complete character."""
    for length in range(1, min(_MAX_CONTEXT, len(prompt_token_ids)) + 1):
        token_ids = list(prompt_token_ids[-length:])
        text = tokenizer.decode(token_ids)
        if text and text[-1] != _UNFINISHED:
            return token_ids
    return []


class OutOfTime(Exception):
    """Raised by `time_limit` in the code that it limits."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside the block when it has run for `seconds`, on whichever thread it runs.

    A long call into C is not interrupted before it returns. The exception can be raised between any two bytecodes:
    code that holds a lock or updates shared state must not run in the block. Templates do neither.
    """
    thread_id = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_over = False

    def fire() -> None:
        with lock:
            if not is_over:
                _raise_in(thread_id, ctypes.py_object(OutOfTime))

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    with lock:  # an exception inside `start` leaves the module's list of threads broken
        timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        # A pending exception is raised at this call of a Python function, inside the block. It is not revoked, since
        # that marks the thread in CPython 3.11: a profiler or debugger then hangs in it.
        timer.cancel()


def read_json(path: Path) -> dict[str, Any]:
    """Return a checkpoint's JSON object; empty if the file is missing. Raises ModelLoadError for a broken file."""
    advice = "Download this file again."
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}. Correct this.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({first_line(error)}). {advice}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object. {advice}")
    return value


def _eos_ids(path: Path) -> list[int]:
    config = read_json(path)
    text_config = config.get("text_config")
    values = [config.get("eos_token_id"), text_config.get("eos_token_id") if isinstance(text_config, dict) else None]
    ids = [token_id for value in values for token_id in (value if isinstance(value, list) else [value])]
    return [token_id for token_id in ids if isinstance(token_id, int)]


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, or of its description. A sequence has several."""
    is_description = component is None or isinstance(component, dict)
    state = component if is_description else json.loads(component.__getstate__())
    match state:
        case {"normalizers": steps} | {"pretokenizers": steps} | {"decoders": steps}:
            for step in steps:
                yield from steps_of(step)
        case dict():
            yield state


def _byte_of_char() -> dict[str, int]:
    """Return the printable characters of byte-level vocabularies for bytes, as in GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
