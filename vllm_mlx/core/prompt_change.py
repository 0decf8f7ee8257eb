"""Why a prompt does not begin with the previous prompt of its conversation. It holds no words of either."""

from dataclasses import dataclass
from enum import StrEnum

from .messages import Role


class ChangeCause(StrEnum):
    TOOLS = "tools"  # the client sent other tools, or sent them in another order
    MESSAGE = "message"  # the client changed a message, or left it out
    SETTINGS = "settings"  # reasoning, effort, or another variable of the template
    TEMPLATE = "template"  # the same messages, which the template now renders differently
    TOKENS = "tokens"  # the same text in other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """The first difference between two prompts, at token `num_common_tokens`.

    A token id is None if its prompt ends there. `message` is the index of the changed message, system messages
    included; None if the change lies before the first message.
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
