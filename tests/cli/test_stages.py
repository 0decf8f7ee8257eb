"""A start of `vllm-mlx serve` as a person in a terminal sees it, and as a file of its log has it."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cli.terminal import SECONDS, terminal
from tests.support.commands import address, served
from tests.support.running import eventually
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.stage import LoadStage
from vllm_mlx.engine.sizing import load_measured
from vllm_mlx.runner.checkpoint import find_checkpoint

BROWSER = {"user-agent": "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15"}
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 200}


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_CACHE_DISK", "0")


def test_a_terminal_shows_stages_in_one_line_and_a_row_for_each_reply() -> None:
    with terminal("serve", "demo", "--text-only", "--port", "0", columns=80) as seen:
        before = seen.wait_for("is ready, ")
        shown = before.split("\r\x1b[K")[1:-1]
        drawn = [text for text in shown if not text.endswith("\r\n")]  # the others are lines of the log
        assert len(drawn) > 1 and all(re.fullmatch(r"Loading demo: [a-z ]+(, \d+%)?", text) for text in drawn)
        assert "Loading" not in before.split("\r\x1b[K")[-1], "the line is removed at the end"
        url = address(seen.wait_for(r"curl http://\S+"))
        seen.wait_for(r"Ctrl-C stops the server\.\s+")
        with httpx.Client(base_url=url, headers=BROWSER, trust_env=False, timeout=SECONDS) as client:
            for path in ("/", "/page/app.js", "/favicon.ico", "/v1/models"):
                client.get(path, headers={"accept": "text/html"})
            for _ in range(2):
                client.post("/v1/chat/completions", json=CHAT)
            client.post("/v1/chat/completions", json={"messages": 1})
        rows = seen.wait_for(r"chat browser · [\d.]+ s · 400[^\n]*\n")
        time, number = r"\d\d:\d\d:\d\d", r"[\d,]+"
        reply = rf"{time} chat browser · {number} in \({number} cached\) · {number} out · [\d.]+ s · {number}/s · stop"
        models, first, second, refused = (line.strip() for line in rows.strip().splitlines())
        assert re.fullmatch(rf"{time} GET /v1/models browser · [\d.]+ s · 200", models)
        assert re.fullmatch(reply, first) and re.fullmatch(reply, second)
        assert "(0 cached)" in first and "(0 cached)" not in second
        assert re.fullmatch(rf"{time} chat browser · [\d.]+ s · 400 \w+", refused)
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(SECONDS) == 0


def test_a_file_has_a_line_for_each_stage_and_keys_with_values(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr, served("demo", "--text-only", stderr=stderr) as (_, printed):
        with httpx.Client(base_url=address(printed), headers=BROWSER, trust_env=False, timeout=SECONDS) as client:
            client.get("/", headers={"accept": "text/html"})
            client.post("/v1/chat/completions", json=CHAT)
            client.get("/v1/models")
        eventually(lambda: "path=/v1/models" in log.read_text())
        lines = log.read_text().splitlines()
    stages = [line.partition("INFO Loading ")[2] for line in lines if "INFO Loading " in line]
    assert stages and len(set(stages)) == len(stages) and all(stage.startswith("demo: ") for stage in stages)
    requests = [line for line in lines if " method=" in line]
    assert [re.findall(r"path=(\S+)", line)[0] for line in requests] == ["/v1/chat/completions", "/v1/models"]
    assert "\x1b" not in log.read_text() and re.match(r"\d{4}-\d\d-\d\d .* INFO id=\S+ status=200 ", requests[0])


class Told(LoadStage):
    """Keeps all that it was told."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("name", "share"):
            self.seen.append((self.name, getattr(self, "share", None)))

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])
        super().__init__()


def test_a_load_names_its_parts_and_the_share_of_the_weights(checkpoint: Callable[..., Path]) -> None:
    stage = Told()
    path = str(checkpoint("qwen3"))
    load_measured(EngineConfig(model=path, memory_budget_bytes=1 << 30), find_checkpoint(path), stage=stage)
    names = list(dict.fromkeys(name for name, _ in stage.seen if name))
    assert names == ["reading weights", "measuring a step", "comparing cached with computed"]
    shares = [share for name, share in stage.seen if name == "reading weights" and share is not None]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1


def test_a_start_that_fails_a_check_shows_no_loading() -> None:
    with terminal("serve", "nonsense", "--port", "0", columns=80) as seen:
        told = seen.wait_for("doctor` names models that fit this machine.")
    assert "Loading" not in told
    assert max(map(len, told.splitlines())) <= 80 and "No folder nonsense" in " ".join(told.split())
