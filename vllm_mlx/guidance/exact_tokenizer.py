"""Tokenises the text that a grammar forces: the bytes of the tokens are exactly the bytes of the text. Thread-safe."""

import json

import tokenizers

from ..formats.tokenizer import Tokenizer, steps_of

_SPECIAL = b"\xff"  # llguidance's mark of a token that is not text; this byte does not occur in text


class ExactTokenizer:
    """The interface that llguidance expects of a tokenizer.

    A checkpoint's own tokenizer changes text before it tokenises: it composes accents, adds a space, reads `<s>` as a
    tag. A token of changed text would break the grammar that forces the text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size`: the width of the logits. Ids without a token count as special, and so do all added tokens."""
        self._backend = _without_changes(tokenizer)
        self.eos_token_ids = sorted(tokenizer.eos_token_ids) or [0]
        self.eos_token_id = self.eos_token_ids[0]
        self.tokens = [_token_bytes(tokenizer, token_id) for token_id in range(vocab_size)]
        self._id_of_byte = {token: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode()) or []

    def encode(self, text: str) -> list[int] | None:
        """Return plain tokens of exactly this text, or None if the vocabulary lacks one of its bytes.

        They are the checkpoint's own tokens of the text, except around characters that its tokenizer reads otherwise.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        written = text.encode()
        if b"".join([self.tokens[token_id] for token_id in ids]) == written:
            return ids
        if len(text) == 1:
            found = [self._id_of_byte.get(written[at : at + 1]) for at in range(len(written))]
            return None if None in found else [token_id for token_id in found if token_id is not None]
        middle = len(text) // 2
        start, rest = self.encode(text[:middle]), self.encode(text[middle:])
        return None if start is None or rest is None else [*start, *rest]


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    if token_id >= tokenizer.vocab_size:
        return _SPECIAL + f"<[{token_id}]>".encode()
    written = tokenizer.token_bytes(token_id)
    return written if tokenizer.added_token(token_id) is None else _SPECIAL + written


def _without_changes(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Copy the tokenizer without steps that change text before it is tokenised, except the vocabulary's space."""
    description = json.loads(tokenizer.backend.to_str())
    replaced = (part for part in steps_of(description["normalizer"]) if part["type"] == "Replace")
    spaces = [part for part in replaced if part["pattern"] == {"String": " "}]
    description["normalizer"] = {"type": "Sequence", "normalizers": spaces}
    for part in steps_of(description["pre_tokenizer"]):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
    return tokenizers.Tokenizer.from_str(json.dumps(description))
