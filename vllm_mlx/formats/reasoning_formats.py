"""Reasoning formats that several families share, or that take more than one line of the families' table."""

from dataclasses import replace

from .bodies.compose import harmony_route, header, recipient_route
from .family import Opening, Place, ReasoningFormat, ReasoningTags


def tags(open: str, *closes: str) -> ReasoningFormat:
    return ReasoningFormat((open,), closes)


THINK = tags("<think>", "</think>")
ALWAYS = replace(THINK, is_implied=True)

_MESSAGE = "<|message|>"
_HARMONY_HEADER = header(_MESSAGE, harmony_route)
HARMONY = ReasoningFormat(
    opens=(),
    closes=("<|end|>", "<|return|>"),
    headers=(
        Opening("<|channel|>", _HARMONY_HEADER),
        Opening("<|start|>", _HARMONY_HEADER),
        Opening("to=functions.", _HARMONY_HEADER, Place.AT_START, keeps_marker=True),
    ),
    header_tags=(_MESSAGE, "<|constrain|>"),
    headed=ReasoningTags(
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        atoms=("<|end|>",),
        lead="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
)
_RECIPIENT_HEADER = header(_MESSAGE, recipient_route)
MUSE = ReasoningFormat(
    opens=(),
    closes=("<|eom|>", "<|eot|>"),
    headers=(
        Opening("<|start|>", _RECIPIENT_HEADER),
        Opening("to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
        Opening("assistant to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
    ),
    header_tags=(_MESSAGE,),
    headed=ReasoningTags(
        starts=("to=self<|message|>",),
        ends=("<|eom|>",),
        atoms=("<|eom|>",),
        lead="<|start|>assistant",
        answer=" to=user<|message|>",
    ),
)
