"""`vllm-mlx chat`: a conversation in the terminal, or one question and its reply, over HTTP."""

import base64
import contextlib
import mimetypes
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from .remote import KeyOption, Remote, UrlOption, find_server
from .terminal import CommandFailed, ExitCode, WrongUsage, console, milliseconds, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What every request of a conversation asks for. None: the server's own default."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    thinking: bool | None = None

    def body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URLs that go with the next question

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def add_image(self, path: Path) -> None:
        """Raises WrongUsage."""
        self.images.append(image_url(path))

    def ask(self, text: str) -> None:
        """The next question, and the images that were waiting for it."""
        content: str | list[dict[str, Any]] = text
        if self.images:
            image_parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*image_parts, {"type": "text", "text": text}]
        self.turns.append({"role": "user", "content": content})
        self.images = []

    def answer(self, text: str, reasoning: str) -> None:
        """What came, whole or stopped. Reasoning goes back as it came: the next prompt then extends this one."""
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            turn["reasoning_content"] = reasoning
        self.turns.append(turn)

    def take_back(self) -> None:
        """The question that got no answer, so that it may be asked again."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def clear(self) -> None:
        self.turns, self.images = [], []


def image_url(path: Path) -> str:
    """A file as a `data:` URL: the server may be another machine. Raises WrongUsage."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise WrongUsage(f"Cannot read the image {path}: {error.strerror}.") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if not kind.startswith("image/"):
        raise WrongUsage(f"{path} is no image: give a PNG, JPEG, WebP or GIF file.")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


_MAX_LINES = 1000


class LinePrompt:
    """`remember` false: nothing is read from, or left on, the disk."""

    def __init__(self, *, remember: bool = True):
        self._file = history_file() if remember else None
        try:
            import readline
        except ImportError:  # some Pythons are built without it
            self._readline = None
            return
        self._readline = readline
        if self._file is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._file)

    def read(self) -> str | None:
        """A line, or several where each but the last ends in a backslash. None at the end of input."""
        lines: list[str] = []
        try:
            while True:
                line = input("› " if not lines else "… ")
                lines.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    return "\n".join(lines)
        except EOFError:
            return None

    def save(self) -> None:
        if self._readline is None or self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)  # only its owner may read it, from the start
            self._readline.set_history_length(_MAX_LINES)
            self._readline.write_history_file(self._file)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllm-mlx" / "chat-history"


@dataclass(slots=True)
class Reply:
    """What came so far. `feed` takes the events of a chat completion."""

    started_s: float
    reasoning: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None

    def feed(self, event: dict[str, Any], now: float) -> tuple[str, str]:
        """The reasoning and the text that this event brought."""
        self.usage = event.get("usage") or self.usage
        reasoning, text = "", ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            text += delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.first_s is None and (reasoning or text):
            self.first_s = now
        self.reasoning += reasoning
        self.text += text
        return reasoning, text

    def figures(self, now: float) -> str:
        num_tokens = self.usage.get("completion_tokens")
        if self.first_s is None or num_tokens is None:
            return ""
        details = self.usage.get("prompt_tokens_details") or {}
        writing_s = now - self.first_s
        speed = f", {(num_tokens - 1) / writing_s:.1f} tokens/s" if writing_s > 0 and num_tokens > 1 else ""
        return (
            f"{num_tokens} tokens{speed}, first after {milliseconds(self.first_s - self.started_s)}; "
            f"prompt {self.usage.get('prompt_tokens', 0):,} tokens, {details.get('cached_tokens') or 0:,} cached"
        )


@dataclass(slots=True)
class ReplyPrinter:
    """`show_thinking`: in full, as it comes. `is_plain`: the text alone, for a pipe."""

    console: Console
    show_thinking: bool = False
    is_plain: bool = False

    def print(self, events: Iterator[dict[str, Any]], reply: Reply) -> None:
        """Fills `reply`, which holds what came when this is interrupted."""
        spinner = self.console.status("Reading…", spinner="dots")
        if self._is_live:
            spinner.start()
        try:
            for event in events:
                reasoning, text = reply.feed(event, time.monotonic())
                if reasoning:
                    self._think(reasoning, reply, spinner)
                if text:
                    self._write(text, reply, spinner)
        finally:
            spinner.stop()
            if reply.text or (reply.reasoning and self.show_thinking):
                print(flush=True)

    def close(self, reply: Reply, now: float) -> None:
        if self.is_plain:
            return
        if not reply.text and reply.reasoning and not self.show_thinking:
            self._fold(reply, now)
        if reply.finish_reason == "length":
            self.console.print("It reached its limit of tokens.", style="yellow")
        if figures := reply.figures(now):
            self.console.print(figures, style="dim", markup=False, soft_wrap=True)

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal and not self.is_plain

    def _think(self, reasoning: str, reply: Reply, spinner: Status) -> None:
        if self.show_thinking and not self.is_plain:
            spinner.stop()
            self.console.print(reasoning, style="dim italic", end="", markup=False, soft_wrap=True)
        elif self._is_live:
            spinner.update(f"Thinking… {len(reply.reasoning.split())} words")

    def _write(self, text: str, reply: Reply, spinner: Status) -> None:
        if reply.text == text:  # the first of it
            spinner.stop()
            if reply.reasoning and not self.is_plain:
                print() if self.show_thinking else self._fold(reply, time.monotonic())
        print(text if self.is_plain else printable(text), end="", flush=True)

    def _fold(self, reply: Reply, now: float) -> None:
        reasoning_s = now - (reply.first_s or now)
        words = len(reply.reasoning.split())
        self.console.print(f"▸ thought for {reasoning_s:.1f} s, {words} words (/thinking shows them)", style="dim")


_HELP = """/image PATH   send a picture with the next question
/system TEXT  set the system prompt; without TEXT, remove it
/thinking     show the last thought in full
/clear        begin a new conversation
/quit         end; so does Ctrl-D. Ctrl-C stops a reply."""


def chat(
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", show_default=False, help="Ask this alone, answer, and end.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="TEXT", show_default=False, help="Default: the one served.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", metavar="FILE", show_default=False, help="Send it with the question. Repeat it for more."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", show_default=False, help="System prompt.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="INTEGER", min=1, show_default=False, help="Longest reply.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="NUMBER", min=0, show_default=False, help="0: the likeliest tokens."),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", show_default=False, help="Whether a model that can reason does."),
    ] = None,
    show_thinking: Annotated[
        bool, typer.Option("--show-thinking", help="Show thoughts in full, as they come.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep the lines you type, for the next time.")
    ] = True,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Talk to the model. In a pipe, the question is read from standard input."""
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise WrongUsage("There is no question: give one, or start `vllm-mlx chat` in a terminal.")
    conversation = Conversation(system)
    for path in image or ():
        conversation.add_image(path)
    server = find_server(url, api_key)
    wishes = Wishes(model=server.model(model).name, max_tokens=max_tokens, temperature=temperature, thinking=thinking)
    printer = ReplyPrinter(console(), show_thinking, is_plain=not sys.stdout.isatty())
    talk = Talk(server, wishes, conversation, printer)
    if question is not None:
        if not talk.ask(question):
            raise typer.Exit(ExitCode.INTERRUPTED)
    else:
        talk.run(LinePrompt(remember=history))


class Talk:
    def __init__(self, server: Remote, wishes: Wishes, conversation: Conversation, printer: ReplyPrinter):
        self._server = server
        self._wishes = wishes
        self._conversation = conversation
        self._printer = printer
        self._reasoning = ""  # reasoning of the last reply

    def run(self, prompt: LinePrompt) -> None:
        """Until /quit or the end of input."""
        hint = f"{self._wishes.model} at {self._server.url}. /help lists what else you can type."
        self._printer.console.print(hint, style="dim", markup=False)
        while True:
            try:
                line = prompt.read()
                if line is None or line.strip() in ("/quit", "/exit"):
                    break
                if line.strip():
                    self._take(line.strip())
            except KeyboardInterrupt:  # at the prompt, or just before or after a reply
                self._conversation.take_back()
                print()
        prompt.save()

    def ask(self, text: str) -> bool:
        """False: it was stopped. What came until then stays in the conversation. Raises CommandFailed."""
        images = self._conversation.images
        self._conversation.ask(text)
        reply = Reply(time.monotonic())
        is_whole = True
        try:
            body = self._wishes.body(self._conversation.messages)
            with self._server.events("/v1/chat/completions", body) as events:
                self._printer.print(events, reply)
        except KeyboardInterrupt:
            is_whole = False
        except CommandFailed:
            self._conversation.take_back()
            self._conversation.images = images
            raise
        self._close(reply, is_whole)
        return is_whole

    def _close(self, reply: Reply, is_whole: bool) -> None:
        self._reasoning = reply.reasoning
        if reply.text or reply.reasoning:
            self._conversation.answer(reply.text, reply.reasoning)
        else:
            self._conversation.take_back()
        if not is_whole and not self._printer.is_plain:
            self._printer.console.print("Stopped.", style="yellow")
        self._printer.close(reply, time.monotonic())
        if is_whole and not reply.text and self._printer.is_plain:
            why = "its limit of tokens went into thinking" if reply.finish_reason == "length" else "nothing was said"
            raise CommandFailed(f"The reply has no text: {why}.")

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            else:
                self.ask(line)
        except CommandFailed as error:
            self._printer.console.print(error.message, style="red", markup=False, soft_wrap=True)

    def _command(self, name: str = "", rest: str = "") -> None:
        say = self._printer.console.print
        match name:
            case "image" if rest:
                self._conversation.add_image(Path(rest.strip("'\"")))
                say(f"{len(self._conversation.images)} to go with the next question.", style="dim")
            case "system":
                self._conversation.system = rest or None
            case "thinking":
                say(self._reasoning or "It thought nothing.", style="dim italic", markup=False)
            case "clear":
                self._conversation.clear()
            case "help":
                say(_HELP, style="dim", markup=False)
            case _:
                raise WrongUsage(f"/{name} is no command. /help lists them; a question may not begin with a slash.")
