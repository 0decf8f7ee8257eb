"""Why a prompt does not begin with the one before it in its conversation. Holds no words of either."""

from dataclasses import dataclass
from enum import StrEnum

from .messages import Role


class ChangeCause(StrEnum):
    TOOLS = "tools"  # the client sent other tools, or another order of them
    MESSAGE = "message"  # the client sent another message in that place, or left it out
    SETTINGS = "settings"  # thinking, effort, or another variable of the template
    TEMPLATE = "template"  # the same messages, which the template now shows otherwise
    TOKENS = "tokens"  # the same text from other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """`num_common_tokens` is the index of the first differing token, whose ids are given; None: that prompt ends there.

    `message` counts the request's messages, those of the system included; None: before the first of them, or none.
    """

    cause: ChangeCause
    num_common_tokens: int
    num_previous_tokens: int
    previous_token_id: int | None
    token_id: int | None
    message: int | None = None
    role: Role | None = None

    def __str__(self) -> str:
        """One word for a log line."""
        place = "head" if self.message is None else f"message {self.message} ({self.role})"
        ids = f"{self.previous_token_id} -> {self.token_id}"
        return f"{self.cause} at token {self.num_common_tokens} of {self.num_previous_tokens} ({ids}), {place}"
