"""`vllm-mlx chat` against a real server, in a pipe and in a terminal; a conversation's turns; what a reply shows."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.terminal import SECONDS, terminal
from tests.server.fakes import PROMPT_TOKENS, FakeEngine, Pause, Script, finished, says
from tests.support.commands import address, call, refusal, served
from tests.support.running import eventually, serving
from vllm_mlx.cli.chat import Conversation, LinePrompt, ReplyPrinter, Talk, figures, image_url, reading
from vllm_mlx.cli.remote import Remote, Reply
from vllm_mlx.cli.terminal import WrongUsage
from vllm_mlx.core.events import ReasoningDelta, Started, TextDelta
from vllm_mlx.core.request import Request

ANSWERS = True


def test_one_question_in_a_pipe_is_answered_by_text_alone(demo_url: str) -> None:
    asked = call("chat", "What is 2 + 3?", "--url", demo_url, "--temperature", "0", "--no-thinking")
    piped = call("chat", "--url", demo_url, "--temperature", "0", "--no-thinking", stdin="What is 2 + 3?")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "2 + 3 = 5\n", "")
    assert piped.stdout == asked.stdout


def test_a_thought_that_takes_the_whole_reply_is_a_failure_in_a_pipe(demo_url: str) -> None:
    line = refusal("chat", "What is 2 + 3?", "--url", demo_url, "--thinking", "--max-tokens", "2")
    assert line == "vllm-mlx: The reply has no text: reasoning took all its tokens."


def test_a_conversation_keeps_its_turns_and_ends_with_quit(demo_url: str) -> None:
    with terminal("chat", "--url", demo_url, "--no-thinking", "--temperature", "0") as seen:
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
        seen.wait_for("/nothing is not a command")
        seen.type("/quit")
        assert seen.process.wait(SECONDS) == 0
    history = Path(os.environ["HOME"]) / ".local/state/vllm-mlx/chat-history"
    assert "What is 1 + 1?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_thought_is_folded_and_can_be_shown(demo_url: str) -> None:
    with terminal("chat", "--url", demo_url, "--thinking", "--temperature", "0", "--no-history") as seen:
        seen.wait_for("demo at http://")
        seen.type("What is 2 + 3?")
        folded = seen.wait_for(r"reasoned for .*words")
        assert int(folded.split()[-2]) > 0
        seen.wait_for("cached")
        seen.type("/thinking")
        seen.wait_for(r"/thinking\s+\S*\w+")
    assert not (Path(os.environ["HOME"]) / ".local/state/vllm-mlx").exists()


def never_ends_at_first(request: Request, index: int) -> Script:
    if len(request.messages) == 1:
        return (Started(PROMPT_TOKENS, 0), TextDelta("1, 2"), Pause())
    return says("2 + 3", " = 5")


def test_ctrl_c_stops_the_reply_and_not_the_conversation() -> None:
    engine = FakeEngine(never_ends_at_first)
    with serving(engine) as server, terminal("chat", "--url", server.url, "--no-history") as seen:
        seen.wait_for("tiny at http://")
        seen.type("Count.")
        seen.wait_for("1, 2")
        seen.process.send_signal(signal.SIGINT)
        seen.wait_for("Stopped")
        seen.type("What is 2 + 3?")  # before the prompt is back
        seen.wait_for(r"2 \+ 3 = 5[\s\S]*cached[\s\S]*›")
        seen.press(b"\x04")
        assert seen.process.wait(SECONDS) == 0
        eventually(lambda: len(engine.aborted) == 1)
    assert [message.role for message in engine.requests[1].messages] == ["user", "assistant", "user"]


HOSTILE = ["\x1b", "]52;c;aGk=\x07", "\x1b[2J", "\x9b2J", "\r", "a\tb\n", "end"]


def hostile(request: Request, index: int) -> Script:
    return (Started(PROMPT_TOKENS, 0), *map(ReasoningDelta, HOSTILE), *map(TextDelta, HOSTILE), finished())


def test_a_reply_does_not_control_the_terminal() -> None:
    with (
        serving(FakeEngine(hostile)) as server,
        terminal("chat", "hi", "--url", server.url, "--show-thinking") as seen,
    ):
        shown = seen.wait_for(r"end[\s\S]*end[\s\S]*cached")
    assert "]52;c;aGk=[2J2J" in shown
    for sequence in ("\x1b]", "\x1b[2J", "\x9b", "\x07"):
        assert sequence not in shown


def test_a_reply_in_a_pipe_is_as_it_came() -> None:
    with serving(FakeEngine(hostile)) as server:
        assert call("chat", "hi", "--url", server.url).stdout.startswith("\x1b]52;c;aGk=\x07\x1b[2J")


class Lines(LinePrompt):
    """Types the lines it is given."""

    def __init__(self, *lines: str):
        super().__init__(remember=False)
        self._lines = [*lines]

    def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None


class InterruptedPrinter(ReplyPrinter):
    """Ctrl-C comes as each reply has just ended."""

    def close(self, reply: Reply, now: float) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_as_a_reply_ends_ends_no_conversation() -> None:
    engine, conversation = FakeEngine(), Conversation()
    with serving(engine) as server:
        printer = InterruptedPrinter(Console(highlight=False))
        Talk(Remote(server.url), {"model": "tiny"}, conversation, printer).run(Lines("Hi", "And?"))
    assert [turn["content"] for turn in conversation.turns] == ["Hi", "Hello", "And?", "Hello"]


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
    conversation.images.append(image_url(picture))
    conversation.ask("What is it?")
    conversation.turns.append(Reply(0.0, text="A cat.", reasoning="Hm.").message)
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
    with pytest.raises(WrongUsage, match="is not an image"):
        image_url(text)


def test_only_the_options_that_are_given_are_sent() -> None:
    engine = FakeEngine()
    with serving(engine) as server:
        call("chat", "hi", "--url", server.url)
        call("chat", "hi", "--url", server.url, "--max-tokens", "3", "--temperature", "0", "--no-thinking")
    sent = [
        (request.sampling.max_tokens, request.sampling.temperature, request.thinking) for request in engine.requests
    ]
    assert sent == [(None, None, "auto"), (3, 0, "off")]


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
    assert figures(reply, 12.5) == "5 tokens, 2.0 tokens/s, first after 500 ms; prompt 20 tokens, 16 cached"


def row(computed: int, elapsed_s: float, phase: str = "prefill") -> dict[str, Any]:
    return {"computed_tokens": computed, "prompt_tokens": 5021, "elapsed_s": elapsed_s, "phase": phase}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (row(3584, 24.2), "Reading 3,584 of 5,021 tokens, 160/s, about 9 s"),
        (row(1536, 402.2), "Reading 1,536 of 5,021 tokens, 4/s, about 15 min"),
        (row(0, 2.2), "Reading 0 of 5,021 tokens"),
        (row(0, 2.2, "queued"), "Waiting…"),
    ],
)
def test_how_far_a_prompt_is_comes_from_two_looks(now: dict[str, Any], told: str) -> None:
    assert reading(now, row(0, 1.8)) == told


def test_a_long_prompt_is_told_as_it_is_read() -> None:
    with (
        served("demo", "--text-only", "--max-prefill-chunk", "32") as (_, printed),
        terminal("chat", "Which word? " * 2500, "--url", address(printed), "--max-tokens", "9") as seen,
    ):
        seen.wait_for(r"Reading \d[\d,]* of \d[\d,]* tokens, [\d,]+/s, about \d+ (s|min)")
