"""Turns the texts of a request to an encoder into token ids, in pieces of bounded size."""

import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from tokenizers import Encoding

from ..core.encoding import EncoderFacts
from ..core.errors import InvalidParameter, ModelLoadError, shown
from ..core.request import TextInputs
from ..core.sequence import TokenizedTexts
from ..formats.tokenizer import Tokenizer
from ..util.tasks import Deadline

MAX_TEXT_CHARS = 1 << 22  # of one text
_PIECE_CHARS, _PIECE_TEXTS = 1 << 18, 256  # of the texts that are tokenized together, unless one text alone is longer

_TASK = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
_BEGIN = f'<|im_start|>system\n{_TASK}the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class TextTokenizer:
    """An encoder's tokenizer. Rules of padding and cutting in its files are not followed. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, facts: EncoderFacts, vocab_size: int):
        self._backend, self.facts, self._vocab_size = tokenizer.backend, facts, vocab_size
        self._scores = facts.task == "rerank"
        self._field = "documents" if self._scores else "input"
        self._has_types = facts.has_types and "token_type_ids" in tokenizer.hf.model_input_names
        self._num_special = self._backend.num_special_tokens_to_add(self._scores)

    def prepare(self, inputs: TextInputs, deadline: Deadline | None = None) -> TokenizedTexts:
        """Return the ids of all texts. Ids from a client are taken as they are, without prompt and special tokens.

        Raises InvalidParameter, which names the field, and the errors of `Deadline.check`.
        """
        self._check(inputs)
        prompt = self._prompt(inputs)
        query = self._encode([inputs.query])[0] if inputs.query is not None else None
        ids, types, ends = array("I"), array("B"), []
        for start, piece in self._pieces(inputs.texts):
            if deadline is not None:
                deadline.check()
            encoded = iter(self._encode([prompt + text for text in piece if isinstance(text, str)]))
            for place, text in enumerate(piece, start):
                if isinstance(text, str):
                    whole = self._whole(next(encoded), query, place, truncate=inputs.truncate)
                    ids.extend(whole.ids)
                    types.extend(whole.type_ids)
                else:
                    self._check_length(len(text), place, truncate=inputs.truncate)
                    ids.extend(text[: self.facts.max_tokens])
                ends.append(len(ids))
        return TokenizedTexts(ids=ids, ends=tuple(ends), types=types if self._has_types and any(types) else None)

    def _whole(self, text: Encoding, query: Encoding | None, place: int, *, truncate: bool) -> Encoding:
        """Return the text with special tokens, behind the query if there is one. The longer one is cut first."""
        num_query = 0 if query is None else len(query)
        self._check_length(num_query + len(text) + self._num_special, place, truncate=truncate)
        if (room := self.facts.max_tokens - self._num_special) < num_query + len(text):
            half = (room + (num_query > len(text))) // 2
            num_query = min(num_query, max(room - len(text), half))
            text.truncate(room - num_query)
            if query is not None and num_query < len(query):
                query = Encoding.merge([query])  # a copy, since other texts have the same query
                query.truncate(num_query)
        whole = self._backend.post_process(text) if query is None else self._backend.post_process(query, text)
        if not whole.ids:
            self._refuse("has no token", place)
        return whole

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the ids without special tokens. Half a surrogate pair is read as U+FFFD."""
        sound = [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts]
        lower = [text.lower() for text in sound] if self.facts.lowercase else sound
        return self._backend.encode_batch_fast(lower, add_special_tokens=False)

    def _pieces(self, texts: Sequence[str | tuple[int, ...]]) -> Iterator[tuple[int, Sequence[str | tuple[int, ...]]]]:
        start, num_chars = 0, 0
        for place, text in enumerate(texts):
            num_chars += len(text)
            if place > start and (num_chars > _PIECE_CHARS or place - start >= _PIECE_TEXTS):
                yield start, texts[start:place]
                start, num_chars = place, len(text)
        yield start, texts[start:]

    def _prompt(self, inputs: TextInputs) -> str:
        name = inputs.prompt_name
        if name is None:
            return self.facts.prompts.get(self.facts.default_prompt or "", "")
        if self._scores or name not in self.facts.prompts:
            names = ", ".join(f"`{shown(one)}`" for one in self.facts.prompts if not self._scores) or "none"
            raise InvalidParameter(f"The model has no prompt `{shown(name)}`; it has {names}.", param="prompt_name")
        return self.facts.prompts[name]

    def _check(self, inputs: TextInputs) -> None:
        facts = self.facts
        if (inputs.query is not None) != self._scores or inputs.query == "":
            rule = "must be a text that is not empty" if self._scores else "is for rerankers only"
            raise InvalidParameter(f"`query` {rule}.", param="query")
        if inputs.instruction is not None and not facts.is_causal:
            raise InvalidParameter("The model takes no `instruction`. Leave it out.", param="instruction")
        if inputs.dimensions not in (None, facts.num_dimensions, *facts.dimensions):
            sizes = f"{facts.num_dimensions}" + (" or fewer that it declares" if facts.dimensions else "")
            raise InvalidParameter(f"`dimensions` must be {sizes}, or be left out.", param="dimensions")
        if not inputs.texts:
            raise InvalidParameter(f"`{self._field}` is empty.", param=self._field)
        for place, text in enumerate(inputs.texts):
            if not text:
                self._refuse("is empty", place)
            if isinstance(text, str):
                if len(text) > MAX_TEXT_CHARS:
                    self._refuse(f"has {len(text)} characters; a text has at most {MAX_TEXT_CHARS}", place)
            elif self._scores or inputs.prompt_name is not None:
                self._refuse("must be a text" + ("" if self._scores else ", to go with `prompt_name`"), place)
            elif not 0 <= min(text) <= max(text) < self._vocab_size:
                self._refuse(f"has a token id outside 0 to {self._vocab_size - 1}", place)

    def _check_length(self, num_tokens: int, place: int, *, truncate: bool) -> None:
        if num_tokens > (most := self.facts.max_tokens) and not truncate:
            added = " with the query" if self._scores else ""
            fault = f"has {num_tokens} tokens{added}, and the model reads at most {most}"
            self._refuse(f"{fault}. Shorten it, or set `truncate`", place)

    def _refuse(self, fault: str, place: int) -> None:
        raise InvalidParameter(f"`{self._field}[{place}]` {fault}.", param=f"{self._field}[{place}]")


class RerankPrompts(TextTokenizer):
    """Makes the prompts that Qwen3-Reranker documents: the beginning of all, and what each document adds to it."""

    def __init__(self, tokenizer: Tokenizer, facts: EncoderFacts, vocab_size: int):
        """Raise ModelLoadError for a tokenizer or a template of another form."""
        super().__init__(tokenizer, facts, vocab_size)
        added = self._backend.get_added_tokens_decoder().values()
        markers = (re.escape(token.content) for token in added if token.special or token.content in _END)
        self._markers = re.compile(f"(?={'|'.join(markers)})")
        ids = facts.answer_ids or map(tokenizer.token_id, ("yes", "no"))
        self._answers = tuple(each for each in ids if each is not None and each < vocab_size)
        is_other = '"document"' in (template := tokenizer.chat_template or "") and _TASK not in template
        if is_other or len(self._answers) < 2 or not {"<|im_start|>", "<|im_end|>"} <= tokenizer.marker_tokens:
            raise ModelLoadError("The reranker's prompts are not of the form of Qwen3-Reranker, the only one served.")

    def prepare(self, inputs: TextInputs, deadline: Deadline | None = None) -> TokenizedTexts:
        self._check(inputs)
        begin, end = (encoding.ids for encoding in self._encode([_BEGIN, _END]))
        instruction = inputs.instruction or self._prompt(inputs) or _INSTRUCTION
        parts = [begin + self._plain(f"<Instruct>: {instruction}\n<Query>: {inputs.query}\n<Document>:")]
        num_added = len(parts[0]) + len(end) + 1  # with the answer
        room = max(0, self.facts.max_tokens - num_added)
        for place, text in enumerate(inputs.texts):
            if deadline is not None:
                deadline.check()
            ids = self._plain(f" {text}")
            self._check_length(num_added + len(ids), place, truncate=inputs.truncate and room > 0)
            parts.append([*ids[:room], *end])
        joined = array("I", chain(*parts))
        return TokenizedTexts(ids=joined, ends=tuple(accumulate(map(len, parts))), answer_ids=self._answers)

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens have no meaning: their texts are cut in two."""
        cuts = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        pieces = self._encode([text[start:end] for start, end in pairwise(cuts)])
        return [token_id for piece in pieces for token_id in piece.ids]
