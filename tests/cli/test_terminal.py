"""Text of strangers on a terminal."""

import io

import pytest
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from vllm_mlx.cli.status import status_view
from vllm_mlx.cli.terminal import SafeConsole, one_line, printable

CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))


def test_control_characters_are_removed_but_line_breaks_and_tabs() -> None:
    assert printable(f"a{CONTROLS}é漢🙂\u200d") == "a\t\né漢🙂\u200d"


def test_a_title_becomes_one_line() -> None:
    assert one_line("a\n\x1b[2J b\u2028c") == "a [2J b c"


@pytest.mark.parametrize(
    "shown",
    ["\x1b]52;c;aGk=\x07 word", Text("\x1b[2J word", "bold"), Tree("\x9b2J word"), Table("\x1b]0;t\x07 word")],
)
def test_a_console_writes_no_sequence_but_its_own_styles(shown: object) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard", width=40)
    console.print(shown, style="red", markup=False)
    written = file.getvalue()
    assert "word" in written and "\x1b[" in written
    for sequence in ("\x1b]", "\x1b[2J", "\x9b", "\x07"):
        assert sequence not in written


def test_the_status_of_a_strange_server_is_shown_without_its_sequences() -> None:
    file = io.StringIO()
    fields = {
        "model": "\x1b[2Jm",
        "last_errors": [{"message": "\x1b]52;c;aGk=\x07"}],
        "requests": [{"request_id": "r", "client": "[/b]\x1b[2J", "phase": "\x9b"}],
    }
    SafeConsole(file=file, force_terminal=True).print(status_view("http://a", fields))
    written = file.getvalue()
    assert "52;c;aGk=" in written and "[/b]" in written
    assert "\x1b]" not in written and "\x1b[2J" not in written and "\x9b" not in written
