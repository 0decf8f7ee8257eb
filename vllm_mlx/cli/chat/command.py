"""`vllm-mlx chat`: a conversation in the terminal, or one question and its answer. Talks HTTP alone."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ..failures import CommandFailed, ExitCode, WrongUsage
from ..remote import KeyOption, Remote, UrlOption, find_server
from ..terminal import console
from .conversation import Conversation, Wishes
from .prompt import LinePrompt
from .reply import Reply, ReplyPrinter

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
        self._thought = ""  # the last one

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
        self._thought = reply.reasoning
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
                say(self._thought or "It thought nothing.", style="dim italic", markup=False)
            case "clear":
                self._conversation.clear()
            case "help":
                say(_HELP, style="dim", markup=False)
            case _:
                raise WrongUsage(f"/{name} is no command. /help lists them; a question may not begin with a slash.")
