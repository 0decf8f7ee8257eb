"""`vllm-mlx chat` against a real server, in a pipe and in a terminal; a conversation's turns; what a reply shows."""

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.serving import COMMAND, refusal, run
from vllm_mlx.cli.chat.conversation import Conversation, Wishes, image_url
from vllm_mlx.cli.chat.reply import Reply
from vllm_mlx.cli.failures import WrongUsage

_SECONDS = 60


class Terminal:
    """What a person types, and sees."""

    def __init__(self, file: int, process: subprocess.Popen[bytes]):
        self._file = file
        self.process = process
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def press(self, character: bytes) -> None:
        os.write(self._file, character)

    def wait_for(self, pattern: str) -> str:
        """What was seen up to the pattern; it is not seen again."""
        end = time.monotonic() + _SECONDS
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, self.seen
            try:
                self.seen += os.read(self._file, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"It ended: {self.seen}") from None
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_one_question_in_a_pipe_is_answered_by_text_alone(demo_url: str) -> None:
    asked = run("chat", "What is 2 + 3?", "--url", demo_url, "--temperature", "0", "--no-thinking")
    piped = run("chat", "--url", demo_url, "--temperature", "0", "--no-thinking", stdin="What is 2 + 3?")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "2 + 3 = 5\n", "")
    assert piped.stdout == asked.stdout


def test_a_thought_that_takes_the_whole_reply_is_a_failure_in_a_pipe(demo_url: str) -> None:
    line = refusal("chat", "What is 2 + 3?", "--url", demo_url, "--thinking", "--max-tokens", "2")
    assert line == "vllm-mlx: The reply has no text: its limit of tokens went into thinking."


def test_a_conversation_keeps_its_turns_and_ends_with_quit(demo_url: str) -> None:
    with terminal("--url", demo_url, "--no-thinking", "--temperature", "0") as seen:
        seen.wait_for("demo at http://")
        seen.type("What is 2 + 3?")
        first = seen.wait_for(r"cached")
        assert "2 + 3 = 5" in first
        [first_length] = re.findall(r"prompt (\d+) tokens", first)
        seen.type("What is 1 + 1?")
        second = seen.wait_for(r"cached")
        [(length, cached)] = re.findall(r"prompt (\d+) tokens, (\d+) cached", second)
        assert int(length) > int(first_length)
        assert int(cached) > 0
        seen.type("/nothing")
        seen.wait_for("/nothing is no command")
        seen.type("/quit")
        assert seen.process.wait(_SECONDS) == 0
    history = Path(os.environ["HOME"]) / ".local/state/vllm-mlx/chat-history"
    assert "What is 1 + 1?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_thought_is_folded_and_can_be_shown(demo_url: str) -> None:
    with terminal("--url", demo_url, "--thinking", "--temperature", "0", "--no-history") as seen:
        seen.wait_for("demo at http://")
        seen.type("What is 2 + 3?")
        folded = seen.wait_for(r"thought for .*words")
        assert int(folded.split()[-2]) > 0
        seen.wait_for("cached")
        seen.type("/thinking")
        seen.wait_for(r"/thinking\s+\S*\w+")
    assert not (Path(os.environ["HOME"]) / ".local/state/vllm-mlx").exists()


def test_ctrl_c_stops_the_reply_and_not_the_conversation(demo_url: str) -> None:
    with terminal("--url", demo_url, "--no-thinking", "--temperature", "0", "--no-history") as seen:
        seen.wait_for("demo at http://")
        seen.type("Count to 50.")
        seen.wait_for("1, 2")
        seen.process.send_signal(signal.SIGINT)
        seen.wait_for("Stopped")
        seen.type("What is 2 + 3?")
        seen.wait_for(r"2 \+ 3 = 5[\s\S]*cached[\s\S]*›")
        seen.press(b"\x04")
        assert seen.process.wait(_SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["hello", "--image", "none.png"], 2, "vllm-mlx: Cannot read the image none.png: No such file or directory."),
        (["hello", "--model", "x"], 2, " does not serve x. It serves demo."),
        ([" "], 2, "vllm-mlx: There is no question"),
        (["hello", "--temperature", "9"], 1, "temperature"),
    ],
)
def test_wrong_input_is_one_sentence(demo_url: str, arguments: list[str], code: int, line: str) -> None:
    assert line in refusal("chat", *arguments, "--url", demo_url, code=code)


def test_a_picture_goes_with_the_next_question_alone(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    conversation = Conversation("Be terse.")
    conversation.add_image(picture)
    conversation.ask("What is it?")
    conversation.answer("A cat.", "Hm.")
    conversation.ask("Sure?")
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    assert conversation.messages == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Sure?"},
    ]


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(WrongUsage, match="is no image"):
        image_url(text)


def test_only_what_was_wished_for_is_sent() -> None:
    assert Wishes(model="m").body([]).keys() == {"model", "messages", "stream", "stream_options"}
    body = Wishes(model="m", max_tokens=3, temperature=0, thinking=False).body([])
    assert (body["max_tokens"], body["temperature"]) == (3, 0)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_reply_counts_from_its_first_word() -> None:
    reply = Reply(started_s=10.0)
    usage = {"completion_tokens": 5, "prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}
    events: list[tuple[float, dict[str, Any]]] = [
        (10.2, {"choices": [{"delta": {"role": "assistant"}}]}),
        (10.5, {"choices": [{"delta": {"reasoning_content": "Hm."}}]}),
        (11.5, {"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]}),
        (11.6, {"choices": [], "usage": usage}),
    ]
    for now, event in events:
        reply.feed(event, now)
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("Hm.", "Yes.", "stop")
    assert reply.figures(12.5) == "5 tokens, 2.0 tokens/s, first after 500 ms; prompt 20 tokens, 16 cached"
