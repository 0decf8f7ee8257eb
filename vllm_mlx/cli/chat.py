"""`vllm-mlx chat`: a conversation in the terminal, or one question and its reply, over HTTP."""

import base64
import contextlib
import mimetypes
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from .own_server import model_to_start, own_server, served_name
from .remote import KeyOption, NoServer, Remote, Reply, StartOption, UrlOption, find_server
from .terminal import CommandFailed, ExitCode, WrongUsage, console, milliseconds, option, printable, state_folder


@dataclass(slots=True)
class Conversation:
    """The turns that the next request sends, and the images that the next question sends."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URLs

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str) -> None:
        """Add a question, with the images that wait for it."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.turns.append({"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text})
        self.images = []

    def take_back(self) -> None:
        """Remove the last question if it has no answer, so that it can be asked again."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()


def image_url(path: Path) -> str:
    """Return a file as a `data:` URL, because the server may run on another machine. Raises WrongUsage."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise WrongUsage(f"Cannot read the image {path}: {error.strerror}.") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if not kind.startswith("image/"):
        raise WrongUsage(f"{path} is not an image: give a PNG, JPEG, WebP or GIF file.")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


_MAX_LINES = 1000


class LinePrompt:
    """Reads the lines that the user types. With `remember`, a file keeps them for the next time."""

    def __init__(self, *, remember: bool = True):
        self._file = state_folder() / "chat-history" if remember else None
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
        """Read one line, which a backslash at its end continues. Returns None at the end of input."""
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


def figures(reply: Reply, now_s: float) -> str:
    """Describe the length and the speed of a reply. The text is empty if the server does not count tokens."""
    if not reply.moments or "completion_tokens" not in reply.usage:
        return ""
    writing_s = now_s - reply.moments[0]
    speed = f", {(reply.num_tokens - 1) / writing_s:.1f} tokens/s" if writing_s > 0 and reply.num_tokens > 1 else ""
    return (
        f"{reply.num_tokens} tokens{speed}, first after {milliseconds(reply.moments[0] - reply.started_s)}; "
        f"prompt {reply.num_prompt_tokens:,} tokens, {reply.num_cached_tokens:,} cached"
    )


def reading(row: Mapping[str, Any], first: Mapping[str, Any], models: Sequence[Mapping[str, Any]] = ()) -> str:
    """Describe the progress of a prompt, by its present and its first row in the status, or of its model."""
    loading = [each["progress"] for each in models if each["name"] == row.get("model") and each["progress"] is not None]
    if loading:
        return f"Loading the model, {loading[0]:.0%}"
    done, total = row["computed_tokens"], row["prompt_tokens"]
    if row["phase"] == "queued":
        return "Waiting…" if total else "Reading…"
    per_s = (done - first["computed_tokens"]) / max(row["elapsed_s"] - first["elapsed_s"], 1e-3)
    left_s = (total - done) / per_s if per_s > 0 else 0.0
    rest = f", {per_s:,.0f}/s, about " + (f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min")
    return f"Reading {done:,} of {total:,} tokens{rest if per_s > 0 else ''}"


@dataclass(slots=True)
class ReplyPrinter:
    """Prints a reply as it arrives, and then its figures."""

    console: Console
    show_thinking: bool = False  # print reasoning in full, instead of one line that says how long it took
    is_plain: bool = False  # print only the text, for a pipe

    def print(self, events: Iterator[dict[str, Any]], reply: Reply, server: Remote) -> None:
        """Print the events and fill `reply` with them. If it is interrupted, `reply` has the part that has arrived."""
        spinner, ended = self.console.status("Reading…", spinner="dots"), threading.Event()
        if self._is_live:
            spinner.start()
            threading.Thread(target=self._watch, args=(reply, server, spinner, ended), daemon=True).start()
        try:
            for event in events:
                reasoning, text = reply.feed(event, time.monotonic())
                if reasoning:
                    self._think(reasoning, reply, spinner)
                if text:
                    self._write(text, reply, spinner)
        finally:
            ended.set()
            spinner.stop()
            if reply.text or (reply.reasoning and self.show_thinking):
                print(flush=True)

    def _watch(self, reply: Reply, server: Remote, spinner: Status, ended: threading.Event) -> None:
        """Show how far the prompt is, until the reply begins or has ended."""
        first: Mapping[str, Any] = {}
        with contextlib.suppress(CommandFailed):  # a server of another kind
            while not (ended.wait(0.5) or reply.moments):
                status = server.status()
                rows = {row["request_id"]: row for row in status["requests"]}
                if (row := rows.get(reply.reply_id)) and not reply.moments:
                    first = first or (row if row["phase"] != "queued" else {})
                    spinner.update(reading(row, first, status["models"]))

    def close(self, reply: Reply, now: float) -> None:
        if self.is_plain:
            return
        if not reply.text and reply.reasoning and not self.show_thinking:
            self._fold(reply, now)
        if reply.finish_reason == "length":
            self.console.print("The reply reached its limit of tokens.", style="yellow")
        if text := figures(reply, now):
            self.console.print(text, style="dim", markup=False, soft_wrap=True)

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal and not self.is_plain

    def _think(self, reasoning: str, reply: Reply, spinner: Status) -> None:
        if self.show_thinking and not self.is_plain:
            spinner.stop()
            self.console.print(reasoning, style="dim italic", end="", markup=False, soft_wrap=True)
        elif self._is_live:
            spinner.update(f"Reasoning… {len(reply.reasoning.split())} words")

    def _write(self, text: str, reply: Reply, spinner: Status) -> None:
        if reply.text == text:  # this is the first part
            spinner.stop()
            if reply.reasoning and not self.is_plain:
                print() if self.show_thinking else self._fold(reply, time.monotonic())
        print(text if self.is_plain else printable(text), end="", flush=True)

    def _fold(self, reply: Reply, now: float) -> None:
        reasoning_s = now - reply.moments[0]
        words = len(reply.reasoning.split())
        self.console.print(f"▸ reasoned for {reasoning_s:.1f} s, {words} words (/thinking prints them)", style="dim")


_HELP = """/model NAME   go on with another model; without NAME, choose one
/image PATH   send an image with the next question
/system TEXT  set the system prompt; without TEXT, remove it
/thinking     print the last reasoning in full
/clear        start a new conversation
/quit         end; Ctrl-D does the same. Ctrl-C stops a reply."""


def chat(
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", show_default=False, help="Question to answer, instead of a conversation."),
    ] = None,
    model: StartOption = None,
    image: Annotated[
        list[Path] | None, option("--image", "FILE", "Image to send with the question. Repeat it for more.")
    ] = None,
    system: Annotated[str | None, option("--system", "TEXT", "System prompt.")] = None,
    max_tokens: Annotated[int | None, option("--max-tokens", "INTEGER", "Longest reply, in tokens.", min=1)] = None,
    temperature: Annotated[
        float | None,
        option("--temperature", "NUMBER", "Sampling temperature; 0 always takes the likeliest token.", min=0),
    ] = None,
    thinking: Annotated[
        bool | None, option("--thinking/--no-thinking", None, "Whether a model that can reason does so.")
    ] = None,
    show_thinking: Annotated[bool, option("--show-thinking", None, "Print all reasoning as it arrives.")] = False,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep the lines that you type for the next time.")
    ] = True,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Talk to the model; if no server runs, start one, with `--model`. In a pipe, standard input is the question."""
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise WrongUsage("There is no question: give one, or start `vllm-mlx chat` in a terminal.")
    conversation = Conversation(system, images=[image_url(path) for path in image or ()])
    server = find_server(url, api_key)
    with contextlib.ExitStack() as stack:
        try:
            name = server.chat_model(served_name(model) if url is None else model).name
        except NoServer as missing:
            if url is not None:
                raise
            stack.enter_context(own_server(server, model_to_start(model, missing, "chat"), "chat"))
            name = server.model().name
        options = {
            "model": name,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking},
        }
        given = {name: value for name, value in options.items() if value is not None}
        printer = ReplyPrinter(console(), show_thinking, is_plain=not sys.stdout.isatty())
        talk = Talk(server, given, conversation, printer)
        if question is None:
            talk.run(LinePrompt(remember=history))
        elif not talk.ask(question):
            raise typer.Exit(ExitCode.INTERRUPTED)


class Talk:
    """A conversation with a server, in which the user types questions and commands."""

    def __init__(self, server: Remote, options: Mapping[str, Any], conversation: Conversation, printer: ReplyPrinter):
        self._server = server
        self._options = options
        self._conversation = conversation
        self._printer = printer
        self._reasoning = ""  # reasoning of the last reply

    def run(self, prompt: LinePrompt) -> None:
        """Take lines until /quit or the end of input."""
        hint = f"{self._options['model']} at {self._server.url}. /help lists what else you can type."
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
        """Ask a question and print the reply. Returns False if Ctrl-C stopped it. Raises CommandFailed.

        The part of a stopped reply that has arrived stays in the conversation.
        """
        images = self._conversation.images
        self._conversation.ask(text)
        reply = Reply(time.monotonic())
        is_complete = True
        try:
            with self._server.chat(self._options, self._conversation.messages) as events:
                self._printer.print(events, reply, self._server)
        except KeyboardInterrupt:
            is_complete = False
        except CommandFailed:
            self._conversation.take_back()
            self._conversation.images = images
            raise
        self._close(reply, is_complete)
        return is_complete

    def _close(self, reply: Reply, is_complete: bool) -> None:
        self._reasoning = reply.reasoning
        if reply.text or reply.reasoning:
            self._conversation.turns.append(reply.message)
        else:
            self._conversation.take_back()
        if not is_complete and not self._printer.is_plain:
            self._printer.console.print("Stopped.", style="yellow")
        self._printer.close(reply, time.monotonic())
        if is_complete and not reply.text and self._printer.is_plain:
            why = "reasoning took all its tokens" if reply.finish_reason == "length" else "the model wrote none"
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
                self._conversation.images.append(image_url(Path(rest.strip("'\""))))
                say(f"Images for the next question: {len(self._conversation.images)}.", style="dim")
            case "model":
                self._options = {**self._options, "model": self._server.chat_model(rest or None, asks=True).name}
            case "system":
                self._conversation.system = rest or None
            case "thinking":
                say(self._reasoning or "The last reply has no reasoning.", style="dim italic", markup=False)
            case "clear":
                self._conversation.turns, self._conversation.images = [], []
            case "help":
                say(_HELP, style="dim", markup=False)
            case _:
                raise WrongUsage(f"/{name} is not a command. /help lists them; a question may not begin with a slash.")
