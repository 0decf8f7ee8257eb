"""A tokenizer whose ids are characters."""


class FakeTokens:
    """Token 65 is "A"; ids from 128 are the bytes of a split character."""

    chat_template = "{{ messages }}"

    def token_text(self, token_id: int) -> str:
        return chr(token_id) if token_id < 128 else "\N{REPLACEMENT CHARACTER}"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
