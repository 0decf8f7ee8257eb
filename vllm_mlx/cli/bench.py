"""`vllm-mlx bench`: measures how fast a server answers, over HTTP. It works with any server that has OpenAI's API.

The load is conversations of random words, sent from several threads; each reply is timed.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal, get_args

from rich.table import Table

from ..core.errors import VLLMMLXError
from .remote import KeyOption, ModelOption, Remote, Reply, UrlOption, find_server
from .terminal import NARROW, AsJson, CommandFailed, WrongUsage, console, milliseconds, number_columns, option

Messages = list[dict[str, Any]]
Ask = Callable[[Messages], Reply]
Workload = Literal["new", "shared", "turns"]

# Short words that are one token each in most tokenizers.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face level office door health person art war
history party result change morning reason research girl guy moment air teacher force
"""
_WORDS = tuple(_TEXT.split())


class Words:
    """Random words. Another seed gives other prompts, which no server has in its cache."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def text(self, num_words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=max(1, num_words)))


@dataclass(slots=True)
class Conversation:
    """The questions that one client asks, one after the other."""

    questions: list[str]
    messages: Messages = field(default_factory=list)

    def requests(self) -> Iterator[Messages]:
        """Yield the messages of each request. The caller appends the reply before it takes the next one."""
        for question in self.questions:
            self.messages.append({"role": "user", "content": question})
            yield list(self.messages)


def conversations(
    workload: Workload, num_requests: int, words: Words, *, prompt_words: int, turns: int
) -> list[Conversation]:
    """Make the conversations of a workload.

    `new` prompts have nothing in common. `shared` prompts have one long beginning, and one more conversation comes
    first to cache it. Conversations of the workload `turns` grow, by as many turns.
    """
    match workload:
        case "new":
            return [Conversation([words.text(prompt_words)]) for _ in range(num_requests)]
        case "shared":
            system = {"role": "system", "content": words.text(prompt_words)}
            return [Conversation([words.text(8)], [system]) for _ in range(num_requests + 1)]
        case "turns":
            lengths = [prompt_words, *[max(8, prompt_words // 10)] * (turns - 1)]
            number = -(-num_requests // turns)
            return [Conversation([words.text(length) for length in lengths]) for _ in range(number)]


def ask(server: Remote, options: dict[str, Any], messages: Messages) -> Reply:
    """Send one request and time its reply. A failure is noted in the reply, not raised."""
    reply = Reply(time.perf_counter())
    try:
        with server.chat(options, messages) as events:
            for event in events:
                reply.feed(event, time.perf_counter())
    except VLLMMLXError as error:
        reply.error = error.message
    if reply.error is None and not reply.moments:
        reply.error = "The reply was empty."
    return reply


def run_load(ask: Ask, conversations: Sequence[Conversation], concurrency: int) -> list[Reply]:
    """Run every conversation to its end, `concurrency` at a time. A request that fails ends its conversation."""
    waiting: SimpleQueue[Conversation] = SimpleQueue()
    for conversation in conversations:
        waiting.put(conversation)
    replies: list[Reply] = []  # appending is atomic
    stopped = threading.Event()

    def client() -> None:
        while not stopped.is_set():
            try:
                conversation = waiting.get_nowait()
            except Empty:
                return
            for messages in conversation.requests():
                reply = ask(messages)
                replies.append(reply)
                if reply.error is not None or stopped.is_set():
                    break
                conversation.messages.append(reply.message)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(concurrency)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()  # after Ctrl-C, no thread asks again
    return replies


class Figures:
    """The figures of one workload at one concurrency. A figure without measurements is None."""

    def __init__(self, workload: str, concurrency: int, replies: Sequence[Reply]):
        good = [reply for reply in replies if reply.error is None]
        errors = [reply.error for reply in replies if reply.error is not None]
        ttfts = [reply.moments[0] - reply.started_s for reply in good]
        computed = [reply.num_prompt_tokens - reply.num_cached_tokens for reply in good]
        writing = [(reply.num_tokens - 1, reply.moments[-1] - reply.moments[0]) for reply in good]
        gaps = [later - earlier for reply in good for earlier, later in pairwise(reply.moments)]
        ends, starts = [reply.moments[-1] for reply in good], [reply.started_s for reply in good]
        self.workload = workload
        self.concurrency = concurrency
        self.requests = len(replies)
        self.failed = len(errors)
        self.first_error = errors[0] if errors else None
        self.seconds = max(ends) - min(starts) if good else 0.0  # from the first request to the last part
        self.prompt_tokens = sum(reply.num_prompt_tokens for reply in good)  # 0 if the server does not count them
        self.cached_tokens = sum(reply.num_cached_tokens for reply in good)
        self.reply_tokens = sum(reply.num_tokens for reply in good)
        self.ttft_p50_s, self.ttft_p99_s = quantile(ttfts, 0.5), quantile(ttfts, 0.99)
        self.itl_p50_s, self.itl_p99_s = quantile(gaps, 0.5), quantile(gaps, 0.99)  # between two parts of a reply
        self.tokens_per_s = self.reply_tokens / self.seconds if self.seconds else 0.0  # of all replies together
        # Of one reply: computed prompt tokens over the time to the first one, and the other tokens over the rest.
        self.reading_tokens_per_s = _rate(zip(computed, ttfts, strict=True))
        self.writing_tokens_per_s = _rate(writing)

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def _rate(parts: Iterable[tuple[int, float]]) -> float | None:
    """Divide all tokens by all seconds. Replies without tokens or time do not count."""
    measured = [part for part in parts if min(part) > 0]
    return sum(tokens for tokens, _ in measured) / sum(seconds for _, seconds in measured) if measured else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, int(rank) - 1)]


_WORKLOADS: tuple[Workload, ...] = get_args(Workload)
_MAX_CONCURRENCY = 256


def bench(
    workload: Annotated[
        str,
        option(
            "--workload",
            "LIST",
            "Prompts that are all `new`, that have a `shared` beginning, or that grow by `turns`.",
            show_default=True,
        ),
    ] = ",".join(_WORKLOADS),
    concurrency: Annotated[
        str,
        option(
            "--concurrency",
            "LIST",
            "How many requests run at the same time; each number is measured.",
            show_default=True,
        ),
    ] = "1,4",
    requests: Annotated[
        int, option("--requests", "INTEGER", "Least number of requests of each measurement.", min=1, show_default=True)
    ] = 8,
    prompt_words: Annotated[
        int,
        option(
            "--prompt-words", "INTEGER", "Words of a prompt; one word is about one token.", min=1, show_default=True
        ),
    ] = 500,
    reply_tokens: Annotated[
        int, option("--reply-tokens", "INTEGER", "Longest reply, in tokens.", min=1, show_default=True)
    ] = 64,
    turns: Annotated[int, option("--turns", "INTEGER", "Turns of one conversation.", min=2, show_default=True)] = 4,
    model: ModelOption = None,
    seed: Annotated[
        int | None,
        option("--seed", "INTEGER", "Number that determines the prompts. Default: prompts are new each time."),
    ] = None,
    as_json: AsJson = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Measure time to first token, gaps between tokens and throughput of any OpenAI-compatible server."""
    chosen, steps = _workloads(workload), _steps(concurrency)
    server = find_server(url, api_key)
    name = model or server.model().name
    words = Words(int.from_bytes(os.urandom(8)) if seed is None else seed)
    ask_server = partial(ask, server, {"model": name, "max_tokens": reply_tokens, "temperature": 0.0})
    _warm_up(ask_server, words)
    rows = []
    for workload in chosen:
        for step in steps:
            print(f"{workload}, {step} at the same time ...", file=sys.stderr)
            # At least as many conversations as requests that run at the same time.
            num_requests = max(requests, step * (turns if workload == "turns" else 1))
            todo = conversations(workload, num_requests, words, prompt_words=prompt_words, turns=turns)
            rows.append(_measure(ask_server, workload, step, todo))
    _show(server, name, rows, as_json=as_json)
    if failed := next((row.first_error for row in rows if row.first_error), None):
        raise CommandFailed(f"{sum(row.failed for row in rows)} requests failed, the first with: {failed}")


def _measure(ask: Ask, workload: Workload, step: int, todo: Sequence[Conversation]) -> Figures:
    if workload == "shared":  # the first request, which caches the beginning, is not measured
        run_load(ask, todo[:1], 1)
        todo = todo[1:]
    return Figures(workload, step, run_load(ask, todo, step))


def _warm_up(ask: Ask, words: Words) -> None:
    """Send a first request, at which a server compiles and allocates. Raises CommandFailed if it fails."""
    if error := ask([{"role": "user", "content": words.text(8)}]).error:
        raise CommandFailed(error)


def _workloads(text: str) -> list[Workload]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    chosen = [workload for workload in _WORKLOADS if workload in names]
    if not names or set(names) - set(chosen):
        raise WrongUsage(f"--workload {text}: choose from {', '.join(_WORKLOADS)}, separated by commas.")
    return chosen


def _steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = [0]
    if not all(1 <= step <= _MAX_CONCURRENCY for step in steps):
        raise WrongUsage(f"--concurrency {text}: write numbers from 1 to {_MAX_CONCURRENCY}, such as 1,4,8.")
    return sorted(set(steps))


def _show(server: Remote, name: str, rows: list[Figures], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": server.url, "model": name, "figures": [vars(row) for row in rows]}, indent=2))
    else:
        screen = console()
        screen.print(f"{name} at {server.url}", markup=False)
        for workload in dict.fromkeys(row.workload for row in rows):
            screen.print(f"\n{workload}")
            screen.print(_table([row for row in rows if row.workload == workload]))


def _table(rows: list[Figures]) -> Table:
    names = ("At once", "Count", "Prompt", "Cached", "TTFT p50", "p99", "ITL p50", "p99", "Read/s", "Write/s", "All/s")
    table = Table(*number_columns(*names), **NARROW)
    for row in rows:
        good = row.requests - row.failed
        rates = (row.reading_tokens_per_s, row.writing_tokens_per_s, row.tokens_per_s)
        times = (row.ttft_p50_s, row.ttft_p99_s, row.itl_p50_s, row.itl_p99_s)
        table.add_row(
            str(row.concurrency),
            f"{row.requests}" + (f"\n{row.failed} failed" if row.failed else ""),
            f"{row.prompt_tokens // good:,}" if good and row.prompt_tokens else "–",
            "–" if row.cached_share is None else f"{row.cached_share:.0%}",
            *("–" if seconds is None else milliseconds(seconds) for seconds in times),
            *("–" if rate is None else f"{rate:,.{int(rate < 100)}f}" for rate in rates),
        )
    return table
