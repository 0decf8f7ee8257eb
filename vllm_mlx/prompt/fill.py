"""Fill-in: prompts of a text before the cursor and a text behind it, in the form that each family of tokens documents.

It knows tokens only: a tokenizer can have them although its model was not trained to fill in.
"""

from dataclasses import dataclass
from itertools import pairwise, takewhile

from ..core.errors import Unsupported
from ..formats.tokenizer import Tokenizer

_MAX_SPACE = 32  # tokens of white space before the cursor's line that are computed again, at most
_MARK = "☺"  # put before a text that continues another one, where a tokenizer adds a space to each text


@dataclass(frozen=True, slots=True)
class _Family:
    """The spelling of the tokens before the prefix, the suffix and the reply."""

    prefix: str
    suffix: str
    middle: str = ""  # empty: the reply continues the prefix
    suffix_first: bool = False
    begins_with_bos: bool = False  # also if the tokenizer itself puts no token before a text


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Stable Code, Granite up to 3
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", begins_with_bos=True),  # CodeLlama
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", suffix_first=True, begins_with_bos=True),  # Codestral
)
_ENDS = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "<|end_of_text|>", "▁<EOT>", "<EOT>", "<|EOT|>",
    "<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|repo_name|>", "<repo_name>", "<reponame>", "<|reponame|>",
    "<filename>", "<|filename|>", "[MIDDLE]",
)  # fmt: skip


class FillIn:
    """The tokens of fill-in that one tokenizer has. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._families = [family for family in _FAMILIES if self._ids(family.prefix, family.suffix, family.middle)]
        markers = {text for each in self._families for text in (each.prefix, each.suffix, each.middle)}
        ends = (*markers, *_ENDS) if markers else ()
        self.end_ids = frozenset(token_id for text in ends for token_id in self._ids(text))  # they end a reply
        controls = (each for each in tokenizer.added.ids.values() if (tokenizer.added_token(each) or ("", False))[1])
        self._special_ids = self.end_ids.union(controls)
        alone = tokenizer.backend.encode("a")
        specials = zip(alone.ids, alone.special_tokens_mask, strict=True)
        self._start = tuple(token_id for token_id, _ in takewhile(lambda pair: pair[1], specials))
        plain = tokenizer.encode("a", add_special_tokens=False)
        self._mark = _MARK if plain and tokenizer.token_bytes(plain[0]).startswith(b" ") else ""

    def prompt(self, prefix: str | tuple[int, ...], suffix: str) -> tuple[int, ...]:
        """Return the ids of the prompt that asks for the text between two texts. Raises Unsupported without tokens.

        No spelling in the texts counts as a special token.
        """
        if not self._families:
            raise Unsupported(
                "`suffix` needs a model whose tokenizer has the tokens of fill-in: Qwen2.5-Coder, StarCoder, "
                "DeepSeek-Coder, CodeLlama, CodeGemma, Granite, Codestral or Seed-Coder. This model's tokenizer has "
                "none. Leave `suffix` out, or ask one of those.",
                param="suffix",
            )
        family, bos = self._families[0], self._tokenizer.hf.bos_token_id
        start = self._start or ((bos,) if family.begins_with_bos and bos is not None else ())
        before = (*self._ids(family.prefix), *(self._plain(prefix, "") if isinstance(prefix, str) else prefix))
        behind = (*self._ids(family.suffix), *self._plain(suffix, self._mark))
        parts = (behind, before) if family.suffix_first else (before, behind)
        return (*start, *parts[0], *parts[1], *self._ids(family.middle))

    def resume_point(self, token_ids: tuple[int, ...]) -> int | None:
        """Return the number of tokens before the line break that ends the prefix's last whole line.

        The next key press changes the text after it. White space before the line break counts as text after it, because
        a tokenizer can join it with new line breaks. Returns None if the prompt is not a fill-in.
        """
        for family in self._families:
            (prefix,), (suffix,) = self._ids(family.prefix), self._ids(family.suffix)
            if prefix in token_ids and suffix in token_ids:
                start = len(token_ids) - token_ids[::-1].index(prefix)
                end = token_ids.index(suffix, start) if suffix in token_ids[start:] else len(token_ids)
                return self._last_line(token_ids, start, end)
        return None

    def _last_line(self, token_ids: tuple[int, ...], start: int, end: int) -> int:
        text = self._tokenizer.token_text
        found = next((at for at in range(end - 1, start - 1, -1) if "\n" in text(token_ids[at])), start)
        first = max(start, found - _MAX_SPACE)
        return next((at for at in range(found, first, -1) if not text(token_ids[at - 1])[-1:].isspace()), first)

    def _ids(self, *texts: str) -> tuple[int, ...]:
        """Return the ids of tokens; empty if one is missing. An empty text has no token."""
        ids = [self._tokenizer.token_id(text) for text in texts if text]
        return () if None in ids else tuple(token_id for token_id in ids if token_id is not None)

    def _plain(self, text: str, mark: str) -> list[int]:
        """Return the ids of a text behind `mark`, cut inside the spelling of each special token."""
        encoding = self._tokenizer.encoding(mark + text)
        ids, spans = encoding.ids, encoding.offsets
        starts = [spans[at][0] + 1 - len(mark) for at, token_id in enumerate(ids) if token_id in self._special_ids]
        cuts = [start for start in starts if start < len(text)]
        if not cuts:
            return [token_id for token_id, (_, end) in zip(ids, spans, strict=True) if end > len(mark)] if mark else ids
        edges = pairwise((0, *cuts, len(text)))
        pieces = [self._plain(text[start:end], self._mark if start else mark) for start, end in edges]
        return [token_id for piece in pieces for token_id in piece]
