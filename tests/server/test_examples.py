"""The examples of docs/api.md: each request is pasted, and its reply has the shape and the words of the page."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.project.sources import ROOT
from tests.support.running import serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```bash\n(curl .*?)```\n```(json|text)\n(.*?)```", PAGE, re.DOTALL)
LEFT_OUT = "…"
RACES = (
    {"queued", "in_progress"},
    {"cancelled", "completed"},
    {"idle", "running"},
)  # whether the demo is faster than the next command
ENDLESS = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 100_000,
    "ignore_eos": True,
    "stream": True,
}


def pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split(LEFT_OUT)))


def differences(shown: Any, got: Any, at: str = "") -> Iterator[str]:
    """Where a reply is not what the page shows. Numbers differ between two runs, and so does what `…` stands for."""
    match shown, got:
        case dict(), dict():
            names = shown.keys() - {LEFT_OUT}
            if not (names <= got.keys() if LEFT_OUT in shown else names == got.keys()):
                yield f"{at} has the fields {sorted(got)}"
            for name in names & got.keys():
                yield from differences(shown[name], got[name], f"{at}.{name}")
        case list(), list():
            parts = [part for part in shown if part != LEFT_OUT]
            if len(got) < len(parts) or (len(got) > len(parts) and LEFT_OUT not in shown):
                yield f"{at} has {len(got)} entries"
            for index, (part, other) in enumerate(zip(parts, got, strict=False)):
                yield from differences(part, other, f"{at}[{index}]")
        case str(), str() if not any({shown, got} <= race for race in RACES):
            if not re.fullmatch(pattern(shown), got):
                yield f"{at} is {got!r}"
        case _:
            numbers = isinstance(shown, int | float) and isinstance(got, int | float)
            if not numbers and type(shown) is not type(got):
                yield f"{at} is {got!r}"


def parsed(shown: str) -> Any:
    """The JSON of the page, in which a bare `…` is a further field or entry."""
    shown = re.sub(r"…(\s*\})", rf'"{LEFT_OUT}": 0\1', shown)
    return json.loads(re.sub(r"…(\s*\])", rf'"{LEFT_OUT}"\1', shown))


def running_id(client: httpx.Client) -> str:
    while True:
        for request in client.get("/v1/status").json()["requests"]:
            if request["phase"] == "generation":
                return str(request["request_id"])


def test_every_endpoint_of_the_tables_has_an_example() -> None:
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/{}]+)", PAGE))
    asked = {path.replace("$id", "{id}") for path in re.findall(r"127\.0\.0\.1:8000(/[\w/$]+)", PAGE)}
    assert {path for path in named if path.replace("/{id}", "/demo") not in asked} <= asked


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are commands of curl")
def test_the_examples_are_answered_as_the_page_shows() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(start_engine(EngineConfig(model="demo")), served_model_names=("demo",)))
        client = stack.enter_context(server.http())
        last = ""
        for command, kind, shown in EXAMPLES:
            if "/v1/requests/$id" in command:
                stack.enter_context(client.stream("POST", "/v1/chat/completions", json=ENDLESS))
                last = running_id(client)
            pasted = command.replace("http://127.0.0.1:8000", server.url)
            got = subprocess.run(
                ["bash", "-c", pasted],
                env={**os.environ, "id": last},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            if kind == "text":
                assert re.match(pattern(shown.rstrip("\n")), got, re.DOTALL), f"{command}{got}"
                continue
            reply = json.loads(got)
            assert list(differences(parsed(shown), reply)) == [], f"{command}{got}"
            last = reply.get("id", last)
