"""Calls that a reply must or may make → a grammar in the model's own format."""

from collections.abc import Iterable, Sequence

from ...formats.family import Place
from ...formats.generic import TOOL_FORMATS
from .guide_grammar import Header, grammars
from .lark import TEXT, LarkWriter, either, interrupted_text, optional
from .shapes import GuidedTool
from .spellings import Spelling, spelling

MAX_CALLS = 8  # of one reply that has to make some: a weak model would never stop


def calls(tools: Sequence[GuidedTool], name: str, writer: LarkWriter, most: int | None) -> str:
    """The expression of one or several calls. `name`: of the format; `most`: calls, None: MAX_CALLS."""
    written = spelling(name, writer.token_texts)
    return f"{writer.text(written.begin)} {_section(tools, written, writer, _most(written, most))}".strip()


def required_calls(tools: Sequence[GuidedTool], name: str, writer: LarkWriter, header: Header, most: int | None) -> str:
    """A reply that makes calls and says nothing else."""
    start = f"{optional(writer.text(header.lead))} {calls(tools, name, writer, most)}".strip()
    return grammars(writer.build(start))


def calls_in_text(tools: Sequence[GuidedTool], name: str, writer: LarkWriter, header: Header, most: int | None) -> str:
    """Free text, in which whatever begins as a call is one."""
    written = spelling(name, writer.token_texts)
    most = _most(written, most)
    if header.answer:  # a call is a message of its own
        answer = f"{writer.text(header.answer)} ({writer.terminal(TEXT)})?"
        start = f"{optional(writer.text(header.lead))} {either((answer, calls(tools, name, writer, most)))}"
        return grammars(writer.build(start.strip()))
    if not written.marker:
        text = writer.terminal(f"({TEXT}) & ~/\\s*[{{\\[<](?s:.*)/")
        return grammars(writer.build(f"({calls(tools, name, writer, most)} | {text})?"))
    return grammars(writer.build(_interrupted(tools, name, written, writer, most)))


def _interrupted(tools: Sequence[GuidedTool], name: str, written: Spelling, writer: LarkWriter, most: int) -> str:
    marker = written.marker
    if written.begin:
        body = f"{writer.text(written.begin[len(marker) :])} {_section(tools, written, writer, most)}"
    else:
        body = _section(tools, written, writer, most, without_first=marker)
    others = [tag for tag in _other_markers(name) if tag not in marker and marker not in tag]
    return interrupted_text({marker: body}, writer, without=others, most="?" if most == 1 else "*")


def _section(
    tools: Sequence[GuidedTool], written: Spelling, writer: LarkWriter, most: int, without_first: str = ""
) -> str:
    """Behind what begins the section. `without_first`: of the first call, so much was written already."""
    call = writer.rule(either(written.kind.call(tool, writer, written.close) for tool in tools))
    first = f"{writer.text(written.open[len(without_first) :])} {call}".strip()
    more = f"{writer.text(written.between)} {writer.text(written.open)} {call}".strip()
    others = f"({more}){{0,{most - 1}}}" if most > 1 else ""
    return f"{first} {others} {writer.text(written.end)}".strip()


def _most(written: Spelling, most: int | None) -> int:
    return 1 if written.is_single else MAX_CALLS if most is None else most


def _other_markers(name: str) -> Iterable[str]:
    """Tags, written as text, that the parser would take for the start of a call."""
    for format in (TOOL_FORMATS[name], TOOL_FORMATS["generic"]):
        for opening in format.openings:
            if opening.place is not Place.AT_START and len(opening.marker) > 1:
                yield opening.marker
