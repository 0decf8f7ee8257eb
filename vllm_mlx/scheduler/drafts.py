"""Guesses the next tokens of a row from tokens that are known. It knows neither models nor costs of drafts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cache.prompt_index import SIZES
from ..cache.prompt_index import PromptIndex as PromptIndex
from ..core.step import BY_HEAD

_LONGEST = max(SIZES)
HEAD = "mtp"  # the source of drafts that the model's MTP head makes
SOURCES = ("grammar", "prediction", "ngram", HEAD)
_INDEXED_AT_ONCE = 2000  # tokens; the engine thread indexes shorter texts itself, in less than a millisecond


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next in a row."""

    tokens: tuple[int, ...]
    source: str  # of SOURCES


@dataclass(slots=True)
class _Guide:
    """A text that the reply may follow, and how far the reply has come in it."""

    tokens: Sequence[int] = ()
    index: PromptIndex | None = None  # finds the place again after the reply has left the text
    position: int = 0
    is_followed: bool = True

    def take(self, token: int) -> None:
        expected = self.tokens[self.position : self.position + 1] if self.is_followed else ()
        self.is_followed = len(expected) == 1 and expected[0] == token
        self.position += self.is_followed

    def following(self, last: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the tokens that follow `last`, the last tokens of the row."""
        if not self.is_followed and self.index is not None:
            found = self.index.find(last, start=self.position)
            if found is not None:
                self.position, self.is_followed = found, True
        return tuple(self.tokens[self.position : self.position + most]) if self.is_followed else ()


class RowDrafts:
    """The text of a row, the n-grams of its reply, and the texts that the reply may follow.

    A token costs the same at any length of prompt and reply.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        index: PromptIndex | None = None,
        prediction: Sequence[int] | PromptIndex = (),
        *,
        has_head: bool = False,
    ):
        """Begin with the prompt, before the first token of the reply.

        A long prompt without an index gives no drafts; its reply does. A long prediction without an index is followed
        until the reply leaves it. `has_head`: the model's MTP head drafts where nothing else does.
        """
        self._has_head = has_head
        self._prompt, self._index = tuple(prompt), index or _indexed(prompt)
        self._reply: list[int] = []
        self._last = self._prompt[-_LONGEST:]
        self._positions: dict[tuple[int, ...], int] = {}  # behind the latest occurrence of an n-gram that ends here
        self._earlier: dict[int, int | None] = {}  # by size: behind the occurrence before the last n-gram
        if isinstance(prediction, PromptIndex):
            self._prediction = _Guide(prediction.token_ids, prediction)
        else:
            self._prediction = _Guide(tuple(prediction), _indexed(prediction))
        self._forced = _Guide()
        self._remember()

    def take(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the reply."""
        for token in token_ids:
            self._reply.append(token)
            self._last = (*self._last, token)[-_LONGEST:]
            self._remember()
            self._forced.take(token)
            self._prediction.take(token)

    def force(self, token_ids: Sequence[int]) -> None:
        """Say which tokens a grammar allows alone, next and in this order. They hold until `take` gets another."""
        self._forced = _Guide(tuple(token_ids))

    def draft(self, most: int) -> Draft | None:
        """Guess the next tokens, `most` at most. The result is not empty."""
        if most <= 0:
            return None
        if tokens := self._forced.following((), most):
            return Draft(tokens, "grammar")
        if tokens := self._prediction.following(self._last, most):
            return Draft(tokens, "prediction")
        if tokens := self._repeated(most):
            return Draft(tokens, "ngram")
        return Draft((BY_HEAD,) * most, HEAD) if self._has_head else None

    def _remember(self) -> None:
        """Look the last n-grams up, and only then insert them: otherwise each would find itself."""
        end = len(self._prompt) + len(self._reply)
        for size in SIZES:
            if len(self._last) >= size:
                ngram = self._last[-size:]
                self._earlier[size] = self._positions.get(ngram)
                self._positions[ngram] = end

    def _repeated(self, most: int) -> tuple[int, ...]:
        """Return the tokens that followed the last n-gram before. Fewer than `most` tokens are repeated."""
        start, num_prompt = self._repetition(), len(self._prompt)
        if start is None:
            return ()
        period = num_prompt + len(self._reply) - start
        positions = (start + number % period for number in range(most))
        return tuple(self._prompt[at] if at < num_prompt else self._reply[at - num_prompt] for at in positions)

    def _repetition(self) -> int | None:
        for size in SIZES[:1] if self._has_head else SIZES:  # an MTP head guesses better than a short n-gram
            found = self._earlier.get(size)
            if found is None and self._index is not None:
                found = self._index.find(self._last, (size,))
            if found is not None:
                return found
        return None


def _indexed(token_ids: Sequence[int]) -> PromptIndex | None:
    return PromptIndex(token_ids) if 0 < len(token_ids) < _INDEXED_AT_ONCE else None
