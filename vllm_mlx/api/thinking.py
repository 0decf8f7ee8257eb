"""What a client says about thinking → what the renderer is told. Knows no protocol."""

from collections.abc import Mapping
from typing import Any, Literal

from ..core.errors import InvalidParameter, Unsupported
from ..core.request import RESERVED_TEMPLATE_KWARGS, check_budget


def decode_thinking(
    effort: str | None, template_kwargs: Mapping[str, Any] | None
) -> tuple[Literal["auto", "on", "off"], dict[str, Any]]:
    """An `enable_thinking` inside `chat_template_kwargs` goes before the effort; the template sees both."""
    kwargs: dict[str, Any] = dict(template_kwargs or {})
    for name in sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise Unsupported(
            f"`chat_template_kwargs.{name}` is not supported: the server sets it. "
            "If there is a request field with this meaning, use the request field.",
            param=f"chat_template_kwargs.{name}",
        )
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    enabled = kwargs.get("enable_thinking")
    if enabled is None and effort is not None:
        enabled = effort != "none"
    match enabled:
        case None:
            return "auto", kwargs
        case bool():
            return "on" if enabled else "off", kwargs
        case _:
            raise InvalidParameter(
                "`chat_template_kwargs.enable_thinking` must be true or false.",
                param="chat_template_kwargs.enable_thinking",
            )


def budget_in(template_kwargs: Mapping[str, Any]) -> int | None:
    """A budget that a client put among the template's arguments; None: there is none, or it is no bound."""
    for name in ("thinking_token_budget", "thinking_budget"):
        value = template_kwargs.get(name)
        if value is None:
            continue
        check_budget(value, f"chat_template_kwargs.{name}")
        assert isinstance(value, int), "it was checked"
        return None if value == -1 else value
    return None
