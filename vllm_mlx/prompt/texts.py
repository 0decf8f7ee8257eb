"""Turns the texts of a request to an encoder into token ids, in pieces of bounded size."""

import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NoReturn

from tokenizers import Encoding

from ..core.encoding import EncoderFacts
from ..core.errors import InvalidParameter, ModelLoadError, shown
from ..core.request import TextInputs
from ..core.sequence import TokenizedTexts
from ..formats.tokenizer import Tokenizer
from ..util.tasks import Deadline

Texts = Sequence[str | tuple[int, ...]]
MAX_TEXT_CHARS = 1 << 22  # of one text
_PIECE_CHARS = 1 << 18  # of the texts that are tokenized together, unless one alone is longer
_TASK = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
_BEGIN = f'<|im_start|>system\n{_TASK}the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class TextTokenizer:
    """An encoder's tokenizer. Its files' rules for padding and cutting are not followed. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, facts: EncoderFacts, vocab_size: int):
        self._backend, self.facts, self._vocab_size = tokenizer.backend, facts, vocab_size
        self._field = "documents" if facts.task == "rerank" else "input"
        self._has_types = facts.has_types and "token_type_ids" in tokenizer.hf.model_input_names
        self._num_special = self._backend.num_special_tokens_to_add(facts.task == "rerank")

    def prepare(self, inputs: TextInputs, deadline: Deadline | None = None) -> TokenizedTexts:
        """Return the ids of all texts. Ids from a client are taken as they are, without prompt and special tokens.

        Raises InvalidParameter, which names the field, and the errors of `Deadline.check`.
        """
        self._check(inputs)
        prompt = self.facts.prompts.get(inputs.prompt_name or self.facts.default_prompt or "", "")
        query = None if inputs.query is None else self._encode([inputs.query])[0]
        num_query = 0 if query is None else len(query)
        if query is not None:
            query.truncate(self.facts.max_tokens)  # each text copies it
        ids, types, ends = array("I"), array("B"), []
        for start, piece in _pieces(inputs.texts):
            encoded = iter(self._encode([prompt + text for text in piece if isinstance(text, str)]))
            for place, text in enumerate(piece, start):
                if deadline is not None:
                    deadline.check()  # a long query is copied for each text
                if isinstance(text, str):
                    whole = self._whole(next(encoded), query, num_query, place, truncate=inputs.truncate)
                    ids.extend(whole.ids)
                    types.extend(whole.type_ids)
                else:
                    ids.extend(text[: self._room(len(text), place, truncate=inputs.truncate)])
                    types.extend(bytes(len(ids) - len(types)))
                ends.append(len(ids))
        return TokenizedTexts(ids=ids, ends=tuple(ends), types=types if self._has_types and any(types) else None)

    def _whole(self, text: Encoding, query: Encoding | None, num_query: int, place: int, *, truncate: bool) -> Encoding:
        """Return the text with special tokens, behind the query if there is one. The longer one is cut first.

        `num_query`: tokens of the whole query, of which `query` has as many as the model reads.
        """
        num_text = len(text)
        most = self._room(num_query + num_text + self._num_special, place, truncate=truncate) - self._num_special
        num_kept = min(num_query, max(most - num_text, (most + (num_query > num_text)) // 2))
        text.truncate(most - num_kept)
        if query is not None and num_kept < len(query):
            query = Encoding.merge([query])  # a copy, since other texts have the same query
            query.truncate(num_kept)
        whole = self._backend.post_process(text) if query is None else self._backend.post_process(query, text)
        return whole if whole.ids else self._refuse("has no token", place)

    def _room(self, num_tokens: int, place: int, *, truncate: bool) -> int:
        """Return the number of tokens that the model reads. Refuse more, unless they are to be cut."""
        if num_tokens > (most := self.facts.max_tokens) and not truncate:
            read = f"has {num_tokens} tokens{' with the query' if self._field == 'documents' else ''}"
            self._refuse(f"{read}, and the model reads at most {most}. Shorten it, or set `truncate`", place)
        return most

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the ids without special tokens. Half a surrogate pair is read as U+FFFD."""
        sound = [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts]
        lower = [text.lower() for text in sound] if self.facts.lowercase else sound
        return self._backend.encode_batch_fast(lower, add_special_tokens=False)

    def _check(self, inputs: TextInputs) -> None:
        facts, name, scores = self.facts, inputs.prompt_name, self.facts.task == "rerank"
        prompts = ", ".join(map(shown, facts.prompts)) if facts.prompts and not scores else "none"
        short = f"at most {MAX_TEXT_CHARS} characters long"
        lengths = f"{facts.num_dimensions}{', or a length that the model declares' if facts.dimensions else ''}"
        for param, is_right, rule in (
            ("query", bool(inputs.query) if scores else inputs.query is None, "a text" if scores else "left out"),
            ("query", len(inputs.query or "") <= MAX_TEXT_CHARS, short),
            ("instruction", inputs.instruction is None or facts.is_causal, "left out"),
            ("instruction", len(inputs.instruction or "") <= MAX_TEXT_CHARS, short),
            (
                "prompt_name",
                name is None or (name in facts.prompts and not scores),
                f"a prompt of the model ({prompts})",
            ),
            ("dimensions", inputs.dimensions in (None, facts.num_dimensions, *facts.dimensions), lengths),
            (self._field, bool(inputs.texts), "a list that is not empty"),
        ):
            if not is_right:
                raise InvalidParameter(f"`{param}` must be {rule}.", param=param)
        for place, text in enumerate(inputs.texts):
            if not text or len(text) > MAX_TEXT_CHARS:
                self._refuse(f"is empty, or longer than {MAX_TEXT_CHARS} characters or ids", place)
            if not isinstance(text, str) and (scores or name is not None):
                self._refuse(f"must be a text{'' if scores else ', since `prompt_name` is given'}", place)
            if not isinstance(text, str) and not 0 <= min(text) <= max(text) < self._vocab_size:
                self._refuse(f"has a token id that is not from 0 to {self._vocab_size - 1}", place)

    def _refuse(self, fault: str, place: int) -> NoReturn:
        raise InvalidParameter(f"`{self._field}[{place}]` {fault}.", param=f"{self._field}[{place}]")


def _pieces(texts: Texts) -> Iterator[tuple[int, Texts]]:
    start = num_chars = 0
    for place, text in enumerate(texts):
        if (num_chars := num_chars + len(text)) > _PIECE_CHARS and place > start:
            yield start, texts[start:place]
            start, num_chars = place, len(text)
    yield start, texts[start:]


class RerankPrompts(TextTokenizer):
    """Makes the documented prompts of Qwen3-Reranker: the common beginning, and the part for each document."""

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
        instruction = inputs.instruction or self.facts.prompts.get(self.facts.default_prompt or "") or _INSTRUCTION
        parts = [begin + self._plain(f"<Instruct>: {instruction}\n<Query>: {inputs.query}\n<Document>:")]
        num_added = len(parts[0]) + len(end) + 1  # with the answer
        if (room := self.facts.max_tokens - num_added) <= 0:
            fault = f"has {num_added} tokens with its instruction, and the model reads {self.facts.max_tokens}"
            raise InvalidParameter(f"`query` {fault}. Shorten it.", param="query")
        for place, text in enumerate(inputs.texts):
            if deadline is not None:
                deadline.check()
            ids = self._plain(f" {text}")
            self._room(num_added + len(ids), place, truncate=inputs.truncate)
            parts.append([*ids[:room], *end])
        joined = array("I", chain(*parts))
        return TokenizedTexts(ids=joined, ends=tuple(accumulate(map(len, parts))), answer_ids=self._answers)

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens have no meaning: their texts are cut in two."""
        cuts = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        pieces = self._encode([text[start:end] for start, end in pairwise(cuts)])
        return [token_id for piece in pieces for token_id in piece.ids]
