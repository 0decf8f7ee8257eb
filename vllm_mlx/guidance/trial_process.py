"""Tries grammars in a separate process, so that their cost is known before the server pays it.

llguidance's compiler takes any time and memory for an odd grammar, and cannot be interrupted. So each grammar on
standard input is compiled and followed in a fork of this process, which ends at a limit. Its outcome, a line of JSON,
is written to standard output with the grammar's number: the bytes that it takes, or why it is refused.
"""

import json
import os
import random
import re
import resource
import signal
import struct
import sys
import threading
import time
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

HEADER = struct.Struct(">QI")  # the number and the length of a text, which follows
STACK_BYTES = 512 << 20  # address space; memory is used on demand: 140 MB for 35,000 rules that refer to each other
MAX_COMPILE_S = 5  # computing time
MAX_BYTES = 128 << 20  # that one grammar takes at its peak
MAX_S = 30  # by the clock, on a machine that is busy
_MAX_STEP_S = 0.25  # computing time of one token
_NUM_STEPS = 24  # tokens for which a grammar is followed: nested counts are slow from the start
_WATCH_S = 0.005
_TOO_LARGE = 4  # exit status
_ANY_TEXT = r"start: /(.|\n)*/"
_WRONG_TOKEN = "doesn't satisfy the grammar"
_EXCERPT = re.compile(r"\d+ \||\^+$")
_MAX_MESSAGE = 400
_MAX_ITEMS = 20_000  # parser items of a mask; their time grows with the square of those in one row
_CALLS = '{"grammars": [{"name": "calls", '  # no client can write this
_TERMINAL = re.compile(r"\\nT\d+: ")
_PLAIN = re.compile(r'\{"grammars": \[\{"lark_grammar": "start: r0\\nr0: %json ')


class ByteVocabulary:
    """The bytes as tokens, and the added tokens by their ids. The cost of a grammar hardly depends on other tokens."""

    bos_token_id = None

    def __init__(self, vocab_size: int, added: dict[int, bytes], eos_token_id: int):
        """Make the vocabulary; `added`: llguidance's spelling of each token that is not text."""
        free = iter([token_id for token_id in range(vocab_size) if token_id not in added][:256])
        self.eos_token_id = eos_token_id
        self.bytes = {token_id: bytes([byte]) for byte, token_id in enumerate(free)}
        known = {**self.bytes, **added}
        self.tokens = [known.get(token_id, b"") for token_id in range(vocab_size)]
        self.ids = [token_id for token_id in known if token_id != eos_token_id]
        self._id_of = {text[0]: token_id for token_id, text in self.bytes.items()}

    def __call__(self, text: bytes) -> list[int]:
        return [self._id_of[byte] for byte in text]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the server ends this one
    os.nice(10)  # the replies of the server come first if all cores are busy
    asked = sys.stdin.buffer
    vocab_size, added, eos_token_id = json.loads(_text(asked)[1])
    known = {int(token_id): bytes.fromhex(text) for token_id, text in added.items()}
    vocabulary = ByteVocabulary(vocab_size, known, eos_token_id)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos_token_id)
    while (question := _text(asked))[1]:
        number, grammar = question
        process = os.fork()
        if not process:
            _try(number, grammar, vocabulary, tokenizer)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status in (-signal.SIGXCPU, -signal.SIGALRM):
            _answer(number, refused=f"it takes more than {MAX_COMPILE_S} s to compile as a grammar. Make it simpler.")
        elif status:
            _answer(number, refused="it takes too much memory as a grammar. Make it simpler.")


def _text(source: BinaryIO) -> tuple[int, str]:
    """Read the next text and its number. The text is "" at the end of the input."""
    header = source.read(HEADER.size)
    number, length = HEADER.unpack(header) if header else (0, 0)
    return number, source.read(length).decode()


def _answer(number: int, **outcome: object) -> None:
    """Answer a question. A trial that is killed after its answer has two answers, so each has its question's number."""
    sys.stdout.buffer.write(json.dumps({"number": number, **outcome}).encode() + b"\n")
    sys.stdout.buffer.flush()


def _try(number: int, grammar: str, vocabulary: ByteVocabulary, tokenizer: LLTokenizer) -> None:
    """Try one grammar in this fork, and end it."""
    # A fork counts memory when it first uses it, on macOS even the vocabulary. Use the common part first.
    _fault(_ANY_TEXT, vocabulary, tokenizer)
    before = _peak_bytes()
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_COMPILE_S, MAX_COMPILE_S + 1))
    signal.alarm(MAX_S)
    threading.Thread(target=_watch, args=(before + MAX_BYTES,), daemon=True).start()
    found: list[str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(_fault(grammar, vocabulary, tokenizer)))
    thread.start()
    thread.join()
    _answer(number, refused=found[0], num_bytes=_peak_bytes() - before)
    os._exit(0)


def _watch(max_bytes: int) -> None:
    while _peak_bytes() <= max_bytes:
        time.sleep(_WATCH_S)
    os._exit(_TOO_LARGE)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _fault(grammar: str, vocabulary: ByteVocabulary, tokenizer: LLTokenizer) -> str:
    """Return the reason for a refusal, or "" if the grammar can be followed. The random tokens are always the same."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
    if matcher.is_error():
        return f"it cannot be compiled to a grammar: {reason(matcher)}"
    draw = random.Random(0)
    for _ in range(_NUM_STEPS):
        start_s = time.thread_time()
        mask = matcher.compute_bitmask()
        allowed = [token_id for token_id in vocabulary.ids if mask[token_id >> 3] >> (token_id & 7) & 1]
        if allowed and not matcher.is_error():
            matcher.consume_token(draw.choice(allowed))
        if _WRONG_TOKEN in matcher.get_error():
            break  # an end of the turn that was drawn as a token
        if matcher.is_error() or time.thread_time() - start_s > _MAX_STEP_S:
            why = reason(matcher) or "one token takes too long"
            return f"its grammar is too slow to follow: {why.rstrip('.')}. Make it simpler."
        if not allowed or matcher.is_stopped():
            break
    return ""


def reason(matcher: LLMatcher) -> str:
    """Return the error without its excerpt of the grammar, of which the client wrote only a part."""
    lines = (line.strip() for line in matcher.get_error().replace("<non-verbose/>", "").splitlines())
    return " ".join(line for line in lines if line and not _EXCERPT.match(line))[:_MAX_MESSAGE]


def parser_limits(grammar: str, max_items: int = _MAX_ITEMS) -> LLParserLimits:
    """Return the limits for a grammar, wider for schemas without patterns. `max_items`: parser items of one mask."""
    return LLParserLimits(
        verbose_errors=False,
        initial_lexer_fuel=1_000_000 if is_plain(grammar) else 200_000,  # nested counts: 0.1 s in a mask with 200,000
        max_items_in_row=2000,  # 450 optional properties need 1,800
        step_max_items=max_items,
    )


def is_plain(grammar: str) -> bool:
    """Return whether it is JSON without patterns, or calls with such JSON: 450 integers need much fuel."""
    is_json = _PLAIN.match(grammar) is not None or (is_calls(grammar) and _TERMINAL.search(grammar) is None)
    return is_json and r"\"pattern" not in grammar


def is_calls(grammar: str) -> bool:
    """Return whether this server wrote its rules, for forced calls: their items grow with the optional arguments."""
    return grammar.startswith(_CALLS)


if __name__ == "__main__":
    main()
