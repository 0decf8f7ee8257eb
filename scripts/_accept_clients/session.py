"""Runs one session of one client in an empty home directory, and judges it by its requests."""

import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from vllm_mlx.cli.clients import write_own

from .clients import IMAGE, Client, Place, Setting
from .ending import ending, walled_in
from .install import binary, run_program, search_path
from .relay import REPLY_PATHS, Relay, Seen, relaying

NOTES = ("note", "last")
PROMPT = f"Run `cat {NOTES[0]}`"  # short: the demo copies the command out of a long prompt
QUESTION = "What is in this image?"
# The first command ends at once, the second one half a second after its output: clients may read them differently.
SCRIPTED_COMMANDS = (f"cat {NOTES[0]}", f"cat {NOTES[1]}; sleep 0.5")

_IDLE_S = 10.0  # for what a client left behind
_NOT_STARTED = 127  # the exit code of a shell for a program that it cannot start


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a session. `is_right`: the output of each command came back as the result of a call.

    `has_lost`: the output of the command that ended at once did not come back, and the client is known to lose it.
    """

    client: Client
    seen: list[Seen]
    exit_code: int | None  # None: it had to be ended
    output: str
    wall_s: float
    is_right: bool
    has_lost: bool
    elsewhere: list[str]
    setting: Setting
    by_model: dict[str, int] | None  # requests as the server counts them; None if it has no status
    num_loads: int  # of weights, while the client worked
    cancelled: list[str]  # ids of requests

    @property
    def complaints(self) -> list[str]:
        """Return the reasons against the session. The list is empty if it is accepted."""
        if self.setting.end is not None:
            return self._sent_again
        found = []
        if self.exit_code != 0:
            found.append("it had to be ended" if self.exit_code is None else f"it ended with code {self.exit_code}")
        if not self.seen:
            found.append("it sent no request")
        elif self.client.calls and self.setting.is_scripted and not self.is_right:
            found.append(f"of {len(NOTES)} commands, {self.num_calls} ran, and not every output came back")
        elif self.client.calls and self.is_asked_to_call and not self.num_calls:
            found.append("it ran no call")
        if self.sends_image and not self.has_image:
            found.append("its image did not reach the server")
        found += [f"{each.method} {each.path}: {each.status}" for each in self.seen if _is_refused(each)]
        found += [f"{each.path}: an error in the stream" for each in self.seen if each.num_errors]
        if self.by_model is not None and sum(self.by_model.values()) != self.num_replies:
            found.append(f"the server counted {self.by_model} of {self.num_replies} replies")
        if self.num_loads:
            found.append(f"{self.num_loads} loads of weights while it worked")
        return found

    @property
    def verdict(self) -> str:
        if self.complaints:
            return f"no: {'; '.join(self.complaints)}"
        return "yes, but it lost the output of the command that ended at once" if self.has_lost else "yes"

    @property
    def _sent_again(self) -> list[str]:
        found = ["it had to be ended"] if self.exit_code is None else []
        if self.setting.end != "limit" and not self.cancelled:
            found.append("its prompt was not cancelled")
        if self.num_prompts != 1:
            found.append(f"it sent the prompt {self.num_prompts} times")
        return found

    @property
    def is_asked_to_call(self) -> bool:
        return self.setting.is_scripted or not self.setting.sends_image

    @property
    def sends_image(self) -> bool:
        return self.setting.sends_image and bool(self.client.image)

    @property
    def has_image(self) -> bool:
        return any(each.has_image for each in self.seen)

    @property
    def num_prompts(self) -> int:
        return sum(each.is_main for each in self.seen)

    @property
    def num_replies(self) -> int:
        return sum(each.path in REPLY_PATHS and each.status == 200 for each in self.seen)

    @property
    def num_calls(self) -> int:
        """Return the number of calls that the client ran and of which the model got the result."""
        return max((len(each.results) for each in self.seen if each.is_main), default=0)


def _is_refused(seen: Seen) -> bool:
    """Return whether a request failed. A client may look for a path that is missing, to learn which server this is."""
    is_look = seen.method in ("GET", "HEAD") and seen.status == 404
    return not is_look and not 200 <= seen.status < 300


def run_session(client: Client, setting: Setting) -> Outcome:
    marks = [secrets.token_hex(6) for _ in NOTES]
    relay = Relay(setting.url)
    elsewhere: list[str] = []
    before = _rows(setting.url)
    with tempfile.TemporaryDirectory(prefix="accept-") as folder, relaying(relay) as url:
        place = Place(Path(folder) / "home", Path(folder) / "work", url, setting)
        for each in (place.home, place.work):
            each.mkdir()
        for note, mark in zip(NOTES, marks, strict=True):
            (place.work / note).write_text(mark + "\n")
        Image.new("RGB", (112, 112), "red").save(place.work / IMAGE)
        with walled_in(elsewhere) as environment, ending(setting.url, setting.end) as cancelled:
            started_s = time.monotonic()
            try:
                exit_code, output = _run(client, place, environment)
            except OSError as error:
                exit_code, output = _NOT_STARTED, f"It did not start: {error}"
            wall_s = time.monotonic() - started_s
    rows = _rows(setting.url)
    results = "".join(result for each in relay.seen for result in each.results)
    has_lost = client.loses_output and setting.is_scripted and marks[0] not in results
    is_right = all(mark in results for mark in (marks[has_lost:] if setting.is_scripted else marks[:1]))
    return Outcome(
        client=client,
        seen=relay.seen,
        exit_code=exit_code,
        output=output,
        wall_s=wall_s,
        is_right=is_right,
        has_lost=has_lost,
        elsewhere=sorted(set(elsewhere)),
        setting=setting,
        by_model=None if rows is None else {name: _grew(row, before, name)[0] for name, row in rows.items()},
        cancelled=cancelled,
        num_loads=sum(_grew(row, before, name)[1] for name, row in (rows or {}).items()),
    )


def _rows(url: str) -> dict[str, Any] | None:
    """Wait until the server is idle. Returns the rows of its models, or None if it has none, as without a model."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        answer = httpx.get(f"{url}/v1/status", trust_env=False)
        if not answer.is_success:
            return None
        status = answer.json()
        if status["status"] == "idle" or time.monotonic() > deadline:
            return {row["name"]: row for row in status["models"]}
        time.sleep(0.1)


def _grew(row: Mapping[str, Any], before: Mapping[str, Any] | None, name: str) -> tuple[int, int]:
    """Return the requests and the loads of a model since `before`."""
    was = (before or {})[name]
    num_loads = sum(row["loads"].values()) - sum(was["loads"].values())
    return row["total_requests_processed"] - was["total_requests_processed"], num_loads


def _run(client: Client, place: Place, environment: dict[str, str]) -> tuple[int | None, str]:
    launched = client.for_server(place)
    for path, text in launched.files.items():
        write_own(Path(path), text)
    clean = {"HOME": str(place.home), "PATH": search_path(place.setting.folder), "TERM": "dumb", "LANG": "C.UTF-8"}
    variables = {**clean, **environment, **launched.environment}
    outputs = []
    prompt = QUESTION if place.setting.sends_image and not place.setting.is_scripted else PROMPT
    for arguments in client.runs(place, prompt):
        code, output = run_program(
            [str(binary(client, place.setting.folder)), *arguments],
            limit_s=place.setting.limit_s,
            environment=variables,
            folder=place.work,
        )
        outputs.append(output)
        if code != 0:
            return code, "".join(outputs)
    return 0, "".join(outputs)
