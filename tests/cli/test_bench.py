"""`vllm-mlx bench` against a real server; its figures against moments that are known."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.commands import COMMAND, call, refusal
from vllm_mlx.cli.bench import Figures, Words, conversations, quantile, run_load
from vllm_mlx.cli.remote import Reply

SIZES: dict[str, Any] = {"prompt_words": 20, "turns": 3}


class Slow(BaseHTTPRequestHandler):
    """A server whose replies are five tokens in two parts, some time apart."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "slow"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self._say({"choices": [{"delta": {"content": "one "}}]})
        time.sleep(0.5)
        self._say({"choices": [{"delta": {"content": "two"}, "finish_reason": "length"}]})
        self._say({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 8}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _say(self, event: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def slow_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_tokens_a_second_are_those_of_all_replies_in_the_time_of_all(slow_url: str) -> None:
    load = ("--workload", "new", "--concurrency", "2", "--requests", "4", "--prompt-words", "8")
    [row] = json.loads(call("bench", "--url", slow_url, "--json", *load).stdout)["figures"]
    assert (row["requests"], row["reply_tokens"], row["prompt_tokens"]) == (4, 20, 32)
    assert row["tokens_per_s"] == pytest.approx(20 / row["seconds"])
    printed = call("bench", "--url", slow_url, *load[:3], "1", "--requests", "1", COLUMNS="120").stdout.split()
    ttft_ms, _, _, _, itl_ms, _, _, _, read_per_s, written_per_s, tokens_per_s = printed[-11:]
    assert float(tokens_per_s) == pytest.approx(5 / (float(ttft_ms) + float(itl_ms)) * 1000, rel=0.05)
    assert float(written_per_s) == pytest.approx(4 / float(itl_ms) * 1000, rel=0.05)
    assert float(read_per_s.replace(",", "")) > 0


def test_ctrl_c_ends_a_measurement(slow_url: str) -> None:
    """No thread asks again, and the process ends with one line."""
    asked, may_end = [], threading.Event()

    def ask(messages: Any) -> Reply:
        asked.append(messages)
        if len(asked) == 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert may_end.wait(30)
        return Reply(0.0, [1.0], text="a")

    before, handler = set(threading.enumerate()), signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run_load(ask, conversations("turns", 40, Words(1), **SIZES), 2)
    signal.signal(signal.SIGINT, handler)
    may_end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert len(asked) == 2

    command = [*COMMAND, "bench", "--url", slow_url, "--requests", "1000", "--workload", "new"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "at the same time" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest and len(rest.splitlines()) <= 1


@pytest.mark.full
def test_all_workloads_are_measured(demo_url: str) -> None:
    sizes = ("--requests", "3", "--prompt-words", "60", "--reply-tokens", "4", "--turns", "3")
    result = call("bench", "--url", f"{demo_url}/v1", "--concurrency", "1,2", "--json", *sizes)
    assert result.returncode == 0, result.stderr
    rows = {(row["workload"], row["concurrency"]): row for row in json.loads(result.stdout)["figures"]}
    assert rows.keys() == {(name, step) for name in ("new", "shared", "turns") for step in (1, 2)}
    for (name, step), row in rows.items():
        num_requests = 3 * step if name == "turns" else 3  # each of three turns
        assert (row["failed"], row["requests"]) == (0, num_requests)
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] <= row["seconds"]
        assert row["tokens_per_s"] == pytest.approx(row["reply_tokens"] / row["seconds"])
    for step in (1, 2):
        new, shared = rows["new", step], rows["shared", step]
        assert shared["cached_tokens"] / shared["prompt_tokens"] > 0.5 > new["cached_tokens"] / new["prompt_tokens"]


def test_a_table_is_printed(demo_url: str) -> None:
    result = call("bench", "--url", demo_url, "--workload", "new", "--concurrency", "1", "--requests", "1",
                 "--prompt-words", "8", "--reply-tokens", "2", COLUMNS="80")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"demo at {demo_url}")
    assert "\nnew\n" in result.stdout and "TTFT" in result.stdout
    assert "…" not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80


def test_wrong_input_and_failing_requests_are_one_sentence(demo_url: str) -> None:
    assert "choose from new, shared, turns" in refusal("bench", "--workload", "old", code=2)
    assert "write numbers from 1 to" in refusal("bench", "--concurrency", "1,x", code=2)
    assert "No server answers" in refusal("bench", "--url", "http://127.0.0.1:9")
    assert "does not exist" in refusal("bench", "--url", demo_url, "--model", "other")


def test_figures_are_those_of_the_moments() -> None:
    usage = {"completion_tokens": 6, "prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 5}}
    replies = [
        Reply(0.0, [1.0, 1.5, 3.0], usage=usage),
        Reply(1.0, [5.0, 5.25]),  # counted by its parts
        Reply(1.0, error="no room"),
    ]
    row = Figures("new", 2, replies)
    assert (row.requests, row.failed, row.first_error) == (3, 1, "no room")
    assert (row.seconds, row.reply_tokens, row.tokens_per_s) == (5.25, 8, 8 / 5.25)
    assert (row.ttft_p50_s, row.ttft_p99_s) == (1.0, 4.0)
    assert (row.itl_p50_s, row.itl_p99_s) == (0.5, 1.5)
    assert row.cached_share == 0.5
    assert row.reading_tokens_per_s == 5 / 1.0, "the second reply does not say how long its prompt is"
    assert row.writing_tokens_per_s == (5 + 1) / (2.0 + 0.25)


def test_a_reply_in_one_part_or_from_the_cache_alone_has_no_speed() -> None:
    whole = {"completion_tokens": 9, "prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 10}}
    row = Figures("new", 1, [Reply(0.0, [2.0], usage=whole)])
    assert (row.reading_tokens_per_s, row.writing_tokens_per_s, row.tokens_per_s) == (None, None, 9 / 2)
    alone = {"completion_tokens": 5, "prompt_tokens": 30}
    row = Figures("new", 2, [Reply(0.0, [2.0], usage=whole), Reply(0.0, [3.0, 5.0], usage=alone)])
    assert (row.reading_tokens_per_s, row.writing_tokens_per_s) == (30 / 3.0, 4 / 2.0)


def test_nothing_but_failures_are_figures_too() -> None:
    row = Figures("new", 1, [Reply(0.0, error="no")])
    assert (row.tokens_per_s, row.ttft_p50_s, row.cached_share) == (0.0, None, None)


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile(list(range(1, 101)), share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_workloads_have_in_common_what_they_say() -> None:
    new = conversations("new", 4, Words(1), **SIZES)
    assert len({each.questions[0] for each in new}) == 4
    shared = conversations("shared", 4, Words(1), **SIZES)
    assert len(shared) == 5  # one to read the beginning
    assert len({each.messages[0]["content"] for each in shared}) == 1
    assert len({each.questions[0] for each in shared}) == 5


def test_a_conversation_grows_by_its_answers() -> None:
    [conversation, _] = conversations("turns", 4, Words(1), **SIZES)
    seen = []
    for messages in conversation.requests():
        seen.append([message["role"] for message in messages])
        conversation.messages.append({"role": "assistant", "content": "Yes."})
    assert seen == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
