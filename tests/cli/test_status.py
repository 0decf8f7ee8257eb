"""`vllm-mlx status` against a real server, and the view of what a server says."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.media.hosts import HERE, host, reply
from tests.support.commands import call, refusal
from vllm_mlx.cli.status import status_view

BUSY: dict[str, Any] = {
    "status": "running",
    "model": "org/model",
    "uptime_s": 3700.0,
    "num_running": 1,
    "num_waiting": 2,
    "total_requests_processed": 1234,
    "total_prompt_tokens": 1000,
    "total_cached_tokens": 750,
    "total_completion_tokens": 99,
    "generation_tps": 41.5,
    "prompt_tps": 512.0,
    "latency": {"ttft_s": {"p50": 0.25, "p99": 12.0}, "inter_token_s": {"p50": None, "p99": None}},
    "memory": {"total_bytes": 16_000_000_000, "weights_bytes": 8_000_000_000, "cache_bytes": 1_000_000},
    "cache": {"enabled": True, "hits": 3, "hits_by_kind": {"lcp": 3, "exact": 0}, "misses": 1, "entry_count": 2},
    "requests": [
        {
            "request_id": "chatcmpl-1",
            "client": "claude-cli/2.1.332 (external, cli)",
            "path": "/v1/messages",
            "phase": "generation",
            "progress": 0.5,
            "prompt_tokens": 4321,
            "cached_tokens": 4000,
            "completion_tokens": 17,
            "tokens_per_second": 41.5,
            "ttft_s": 0.25,
            "elapsed_s": 75.0,
        }
    ],
}


def drawn(fields: dict[str, Any], width: int = 140, **more: Any) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(status_view("http://127.0.0.1:8000", fields, **more))
    return captured.get()


def test_json_is_what_the_server_says(demo_url: str) -> None:
    result = call("status", "--json", "--url", demo_url)
    fields = json.loads(result.stdout)
    assert (result.returncode, fields["served_model_names"], fields["num_running"]) == (0, ["demo"], 0)


@pytest.mark.parametrize("arguments", [["--once"], []], ids=["once", "no terminal"])
def test_the_view_is_printed_once(demo_url: str, arguments: list[str]) -> None:
    result = call("status", *arguments, "--url", f"{demo_url}/v1")
    assert result.returncode == 0, result.stderr
    assert "  idle  http://127.0.0.1:" in result.stdout.splitlines()[0]
    assert "No request is running." in result.stdout


def test_no_server_is_one_sentence_that_says_how_to_start_one() -> None:
    line = refusal("status", "--url", "http://127.0.0.1:9")
    assert line == (
        "vllm-mlx: No server answers at http://127.0.0.1:9. Start one with `vllm-mlx serve MODEL`, "
        "or give its address with --url."
    )


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["cache", "memory"], ["models", "load"]])
@pytest.mark.parametrize("answer", [b"[]", b"3", b'{"status": "ok", "cache": 3, "requests": 5, "data": 3}'])
def test_another_program_is_told_from_a_server(command: list[str], answer: bytes) -> None:
    with host() as other:
        other.routes |= dict.fromkeys(("/v1/status", "/v1/cache", "/v1/models"), reply(answer))
        line = refusal(*command, "--url", other.url("", HERE))
    assert line.startswith(f"vllm-mlx: The program at {other.url('', HERE)} is not vllm-mlx.")


def test_the_port_is_that_of_the_settings() -> None:
    assert "http://127.0.0.1:9." in refusal("status", VLLM_MLX_PORT="9")


@pytest.mark.parametrize(
    "command", [["status"], ["models", "load"], ["chat", "Hi"], ["bench"], ["launch", "claude", "--print"]]
)
def test_the_port_is_that_of_the_named_file(command: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "own.toml").write_text("port = 9\n")
    service = Path.home() / ".config/vllm-mlx/service.toml"
    service.parent.mkdir(parents=True)
    service.write_text("port = 10\n")
    assert "http://127.0.0.1:9." in refusal(*command, VLLM_MLX_CONFIG=str(file))


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[::1", "http://my host"])
def test_what_is_no_address_is_a_usage_error(url: str) -> None:
    assert refusal("status", "--url", url, code=2).startswith(f"vllm-mlx: --url {url} is not an address")


def test_every_figure_is_shown_where_it_belongs() -> None:
    text = drawn(BUSY)
    for part in (
        "org/model  running  http://127.0.0.1:8000  up 1 h 1 min",
        "1 running, 2 waiting, 1,234 done",
        "41.5 tokens/s written, 512 read",
        "first token 250 ms / 12.0 s, between tokens – / –",
        "1,000 of prompts, 75% of them from the cache; 99 of replies",
        "3 hits (3 lcp), 1 misses; 2 entries",
        "weights 8.0 GB",
    ):
        assert part in text
    [row] = [line for line in text.splitlines() if "claude-cli/2.1.332 messages" in line]
    assert row.split()[2:] == ["4,321", "4,000", "17", "41.5", "250", "ms", "1", "min", "15", "s"]
    assert "generation, 50%" in text


def test_80_columns_show_all_of_a_busy_server() -> None:
    [request] = BUSY["requests"]
    long = {"request_id": f"chatcmpl-{'0123456789abcdef' * 2}", "prompt_tokens": 131_072, "cached_tokens": 131_000}
    fields = BUSY | {"requests": [request | long | {"elapsed_s": 3599.0, "tier": "disk"}]}
    text = drawn(fields | {"last_errors": [{"status": 404, "code": None, "message": None}]}, width=80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "claude-cli/2.1.332" in text and "chatcmpl" not in text and "131,072" in text and "59 min 59 s" in text
    assert "HTTP 404" in text and "{" not in text


DRAFTS: dict[str, Any] = {
    "enabled": True, "off_reason": None, "parked": None, "num_passes": 1000, "num_drafts": 1000,
    "drafted_tokens": {"grammar": 0, "prediction": 2000, "ngram": 1000},
    "accepted_tokens": {"grammar": 0, "prediction": 1500, "ngram": 100},
    "tokens_per_pass": 2.6,
}  # fmt: skip
ACCEPTED = "1,600 of 3,000 tokens accepted (75% of prediction, 10% of ngram), 2.6 tokens a pass"
DISK: dict[str, Any] = {
    "folder": "/caches/vllm-mlx", "off_reason": None, "used_bytes": 12_300_000_000, "max_bytes": 80_000_000_000,
    "written_today_bytes": 1_200_000_000, "daily_bytes": 50_000_000_000, "num_records": 3120, "num_waiting_bytes": 0,
    "hits": 0, "tokens_read": 0, "bytes_read": 0, "reads_not_made": 0, "reads_not_used": 0, "num_damaged": 0,
}  # fmt: skip
READ = {"hits": 3, "tokens_read": 120_000, "bytes_read": 3_100_000_000}
HELD = "12.3 GB of 80.0 GB in 3,120 records; 1.2 GB of 50.0 GB written today"
RANK: dict[str, Any] = {
    "rank": 1, "host": "192.168.7.2", "active_bytes": 20_500_000_000, "limit_bytes": 48_000_000_000, "plan": 1234,
    "lag_plans": 0, "lag_s": 0.0, "sum_s": 0.000274,
}  # fmt: skip
MAC = "192.168.7.2, 20.5 GB of 48.0 GB; plan 1,234"


@pytest.mark.parametrize(
    ("label", "more", "line"),
    [
        ("Drafts", {"drafts": DRAFTS}, ACCEPTED),
        (
            "Drafts",
            {"drafts": DRAFTS | {"parked": "Too few are accepted."}},
            f"{ACCEPTED}; parked: Too few are accepted.",
        ),
        ("Drafts", {"drafts": DRAFTS | {"num_drafts": 0}}, None),
        ("Drafts", {"drafts": None}, None),
        ("On disk", {"cache": {"disk": None}}, "off"),
        ("On disk", {"cache": {"disk": DISK}}, HELD),
        ("On disk", {"cache": {"disk": DISK | READ}}, f"{HELD}; 3 requests read 120,000 tokens, 3.1 GB"),
        ("On disk", {"cache": {"disk": DISK | {"num_damaged": 2}}}, f"{HELD}; 2 damaged records removed"),
        ("On disk", {"cache": {"disk": DISK | {"off_reason": "The disk is full."}}}, "off: The disk is full."),
        ("Rank 1", {"ranks": [RANK]}, f"{MAC}; a sum takes 0.27 ms"),
        (
            "Rank 1",
            {"ranks": [RANK | {"lag_plans": 2, "lag_s": 0.0315}]},
            f"{MAC}, 2 behind for 32 ms; a sum takes 0.27 ms",
        ),
    ],
)
def test_a_fact_that_not_every_server_has_is_one_line(label: str, more: dict[str, Any], line: str | None) -> None:
    shown = [drawn(fields).splitlines() for fields in (BUSY | more, BUSY)]
    found, without = ([row.removeprefix(label).strip() for row in rows if row.startswith(label)] for rows in shown)
    assert found == ([] if line is None else [line]) and without == []


def test_requests_that_use_the_disk_are_marked() -> None:
    [request] = BUSY["requests"]
    reads = request | {"phase": "queued", "waits_for": "disk"}
    text = drawn(BUSY | {"requests": [reads, request | {"tier": "disk"}, request | {"tier": "memory"}]})
    assert text.count("queued, reads disk") == 1
    assert text.count("(disk)") == 1


def test_the_bar_is_as_long_as_the_budget_and_shows_the_smallest_part() -> None:
    [bar] = [line for line in drawn(BUSY).splitlines() if "░" in line]
    assert (bar.count("█"), bar.count("░")) == (31, 29)


def test_trouble_is_said_above_the_old_figures() -> None:
    assert "No server answers" in drawn(BUSY, trouble="No server answers")


def test_a_server_that_says_little_is_shown_too() -> None:
    assert "No request is running." in drawn({})


def test_a_model_that_is_not_in_memory_is_named_and_what_waits_for_it() -> None:
    waiting = {**BUSY["requests"][0], "phase": "queued", "waits_for": "model"}
    loading = {**BUSY, "models": [{"state": "loading", "progress": 0.25}], "requests": [waiting]}
    assert "org/model  loading 25%" in drawn(loading) and "queued, waits for the model" in drawn(loading)
    failed = {**BUSY, "models": [{"state": "failed", "progress": None, "cause": "The folder is gone."}]}
    assert "failed: The folder is gone." in drawn(failed)
    assert drawn({**BUSY, "models": [{"state": "ready", "progress": None}]}) == drawn(BUSY)


def test_several_models_have_a_row_each_and_requests_name_theirs() -> None:
    row = {"state": "ready", "progress": None, "weights_bytes": 20_400_000_000, "running": 1, "waiting": 0,
           "total_requests_processed": 1234, "generation_tps": 41.5, "last_used_s": 3599.0, "load_s": 0.0,
           "pinned": True, "cause": None, "name": "coder"}  # fmt: skip
    gone = {"state": "unloaded", "weights_bytes": 0, "running": 0, "pinned": False, "load_s": 2.5, "name": "small"}
    failed = {"state": "failed", "cause": "It is broken.", "name": "third", "pinned": False, "running": 0}
    [request] = BUSY["requests"]
    fields = BUSY | {"models": [row, row | gone, row | failed], "requests": [request | {"model": "coder"}]}
    text = drawn(fields, width=80)
    assert text.startswith("coder, small, third  running  ") and max(map(len, text.splitlines())) <= 80
    table = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "coder 20.4 GB 1 0 1,234 41.5 now –",
        "ready, pinned",
        "small – 0 0 1,234 41.5 59 min 59 s 2.5 s",
        "unloaded",
        "coder, generation, 50%",
    ):
        assert line in table
    assert "failed: It is" in text
    alone = drawn(BUSY | {"models": [row | gone]}, width=80)
    assert alone.startswith("org/model  unloaded  running  ") and "coder" not in alone and "small" not in alone
