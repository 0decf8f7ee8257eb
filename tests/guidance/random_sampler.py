"""Draws any token that a grammar allows, all as likely, and reads the reply with its parser."""

import codecs
import json
import random
from collections.abc import Iterable
from functools import cache, cached_property

import numpy as np
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoints import train_tokenizer
from tests.support.named_formats import OutputParser
from vllm_mlx.core.events import ContentEvent, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.formats import SchemaBudget, read_schemas
from vllm_mlx.formats.tokenizer import Tokenizer as OurTokenizer
from vllm_mlx.guidance.grammar_compiler import GrammarCompiler
from vllm_mlx.guidance.grammars import LarkWriter


class RandomSampler:
    """Samples with the test tokenizer, to which `tokens` are added."""

    def __init__(self, tokens: Iterable[str] = (), backend: Tokenizer | None = None):
        """`backend`: the test tokenizer by default."""
        backend = backend or Tokenizer.from_str(train_tokenizer().to_str())
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens])
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
        self.tokenizer = OurTokenizer(fast)
        self.compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size)

    def writer(self) -> LarkWriter:
        return LarkWriter(self.tokenizer.added)

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.tokenizer.vocab_size])

    def draw_reply(
        self, grammar: str, seed: int = 0, *, most: int = 600, ends: float = 0.2, is_tried: bool = True
    ) -> list[int] | None:
        """Return a reply without its last id; None: it did not end. `ends`: how probably it ends where it may.

        `is_tried`: a process tries what the grammar costs first, as it does with the grammars of requests.
        """
        compiled = self.compiler.compile(grammar, "test") if is_tried else self.compiler.compile_own(grammar, "")
        matcher = compiled.deep_copy()
        draw = random.Random(seed)
        ids: list[int] = []
        while len(ids) < most:
            allowed = self.allowed(matcher)
            assert not matcher.is_error(), matcher.get_error()
            inner = allowed[~self._ends[allowed]]
            if len(inner) < len(allowed) and (not len(inner) or draw.random() < ends):
                return ids
            ids.append(self.pick(draw, inner))
            assert matcher.consume_token(ids[-1])
        return None

    def pick(self, draw: random.Random, tokens: np.ndarray) -> int:
        """Draw a token. Tokens that close something are drawn more often: otherwise no string would end."""
        closing = tokens[self._closes[tokens]]
        return int(draw.choice(closing if len(closing) and draw.random() < 0.15 else tokens))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.isin(np.arange(self.tokenizer.vocab_size), list(self.tokenizer.eos_token_ids))

    @cached_property
    def _closes(self) -> np.ndarray:
        closes = ('"', "}", "]", ")", "<", "\n")
        is_added, text = self.tokenizer.added_token, self.tokenizer.token_text
        ids = range(self.tokenizer.vocab_size)
        return np.array([text(token)[:1] in closes or is_added(token) is not None for token in ids])

    def text(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> Iterable[tuple[str, bool]]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            added = self.tokenizer.added_token(token)
            if added is not None:
                yield added[0], True
            elif text := decoder.decode(self.tokenizer.token_bytes(token)):
                yield text, False

    def read(self, ids: Iterable[int], tools: str, specs: Iterable[ToolSpec]) -> "Read":
        parser = OutputParser(
            None,
            tools,
            schemas=read_schemas(((spec.name, spec.parameters, spec.name) for spec in specs), SchemaBudget()),
            marker_tokens=self.tokenizer.marker_tokens,
        )
        events: list[ContentEvent] = []
        for text, special in self.pieces(ids):
            events += parser.feed(text, special)
        return Read([*events, *parser.finish()])


class Read:
    """The text of a reply, and its calls as (name, arguments)."""

    def __init__(self, events: Iterable[ContentEvent]):
        self.text = ""
        self.num_open = 0
        names: list[str] = []
        arguments: list[str] = []
        for event in events:
            match event:
                case TextDelta(text):
                    self.text += text
                case ToolCallStart(_, _, name):
                    names.append(name)
                    arguments.append("")
                    self.num_open += 1
                case ToolCallDelta(index, text):
                    arguments[index] += text
                case ToolCallEnd():
                    self.num_open -= 1
        self.calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@cache
def sampler(tokens: tuple[str, ...] = ()) -> RandomSampler:
    return RandomSampler(tokens)
