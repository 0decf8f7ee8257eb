"""Prompts of a causal reranker, in the form that Qwen3-Reranker documents. Knows no engine."""

import re
from array import array
from itertools import accumulate, chain, pairwise

from ..core.encoding import EncoderFacts
from ..core.errors import InvalidParameter, ModelLoadError
from ..core.request import TextInputs
from ..core.sequence import TokenizedTexts
from ..formats.tokenizer import Tokenizer
from ..util.tasks import Deadline

_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankPrompts:
    """Makes the prompts of a request, one for each document. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, facts: EncoderFacts):
        """Raise ModelLoadError for a tokenizer that lacks tokens of the form."""
        self._tokenizer, self._facts = tokenizer, facts
        added = tokenizer.backend.get_added_tokens_decoder().values()
        markers = (re.escape(token.content) for token in added if token.special or token.content in _END)
        self._markers = re.compile(f"(?={'|'.join(markers)})")
        found = facts.answer_ids or (tokenizer.token_id("yes"), tokenizer.token_id("no"))
        self._answer_ids = tuple(token_id for token_id in found if token_id is not None)
        if len(self._answer_ids) < 2 or not {"<|im_start|>", "<|im_end|>"} <= tokenizer.marker_tokens:
            raise ModelLoadError("The tokenizer has no tokens for `yes`, `no`, `<|im_start|>` and `<|im_end|>`.")

    def prepare(self, inputs: TextInputs, deadline: Deadline, max_tokens: int) -> TokenizedTexts:
        """Tokenize the common beginning of the prompts, of `max_tokens` at most, and what each document adds to it.

        Raises InvalidParameter for a prompt that is too long, unless documents are cut, and what the deadline raises.
        """
        name = inputs.prompt_name or self._facts.default_prompt or ""
        instruction = inputs.instruction or self._facts.prompts.get(name, _INSTRUCTION)
        end = self._tokenizer.encode(_END, add_special_tokens=False)
        parts = [self._tokenizer.encode(_BEGIN, add_special_tokens=False)]
        parts[0] += self._plain(f"<Instruct>: {instruction}\n<Query>: {inputs.query}\n<Document>:")
        limit = max(0, min(self._facts.max_tokens, max_tokens) - len(parts[0]) - len(end))
        for number, text in enumerate(inputs.texts):
            deadline.check()
            ids = self._plain(f" {text}")
            if len(ids) > limit and not (inputs.truncate and limit):
                message = f"`documents[{number}]` has {len(ids)} tokens, and beside this query {limit} have room. "
                raise InvalidParameter(f"{message}Shorten one of them, or set `truncate`.", param="documents")
            parts.append([*ids[:limit], *end])
        ids, ends = array("I", chain(*parts)), tuple(accumulate(map(len, parts)))
        return TokenizedTexts(ids=ids, ends=ends, answer_ids=self._answer_ids)

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens have no meaning: their texts are cut in two."""
        cuts = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        pieces = (self._tokenizer.encode(text[a:b], add_special_tokens=False) for a, b in pairwise(cuts))
        return list(chain.from_iterable(pieces))
