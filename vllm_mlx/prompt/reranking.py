"""Prompts of a causal reranker, in the form that Qwen3-Reranker documents. Knows no engine."""

import re
from array import array
from itertools import accumulate, chain, pairwise

from ..core.encoding import EncoderFacts
from ..core.errors import ModelLoadError
from ..core.request import TextInputs
from ..core.sequence import TokenizedTexts
from ..formats.tokenizer import Tokenizer
from ..util.tasks import Deadline
from .texts import TextTokenizer

_TASK = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
_BEGIN = f'<|im_start|>system\n{_TASK}the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankPrompts(TextTokenizer):
    """Makes the prompts of a request: the beginning of all of them, and what each document adds to it."""

    def __init__(self, tokenizer: Tokenizer, facts: EncoderFacts, vocab_size: int):
        """Raise ModelLoadError for a tokenizer or a template that is not of this form."""
        super().__init__(tokenizer, facts, vocab_size)
        added = self._backend.get_added_tokens_decoder().values()
        markers = (re.escape(token.content) for token in added if token.special or token.content in _END)
        self._markers = re.compile(f"(?={'|'.join(markers)})")
        ids = facts.answer_ids or (tokenizer.token_id("yes"), tokenizer.token_id("no"))
        self._answer_ids = tuple(token_id for token_id in ids if token_id is not None)
        is_other = '"document"' in (template := tokenizer.chat_template or "") and _TASK not in template
        if is_other or len(self._answer_ids) < 2 or not {"<|im_start|>", "<|im_end|>"} <= tokenizer.marker_tokens:
            raise ModelLoadError("The reranker's prompts are not of the form of Qwen3-Reranker, the only one served.")

    def prepare(self, inputs: TextInputs, deadline: Deadline | None = None) -> TokenizedTexts:
        self._check(inputs)
        instruction = inputs.instruction or self._prompt(inputs) or _INSTRUCTION
        begin, end = (encoding.ids for encoding in self._encode([_BEGIN, _END]))
        parts = [begin + self._plain(f"<Instruct>: {instruction}\n<Query>: {inputs.query}\n<Document>:")]
        num_added = len(parts[0]) + len(end) + 1  # with the answer
        room = max(0, self._facts.max_tokens - num_added)
        for place, text in enumerate(inputs.texts):
            if deadline is not None:
                deadline.check()
            ids = self._plain(f" {text}")
            self._check_length(num_added + len(ids), place, truncate=inputs.truncate and room > 0)
            parts.append([*ids[:room], *end])
        joined = array("I", chain(*parts))
        return TokenizedTexts(ids=joined, ends=tuple(accumulate(map(len, parts))), answer_ids=self._answer_ids)

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens have no meaning: their texts are cut in two."""
        cuts = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        pieces = self._encode([text[start:end] for start, end in pairwise(cuts)])
        return [token_id for piece in pieces for token_id in piece.ids]
