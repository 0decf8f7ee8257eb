"""The audit of the lock files, against a service of advisories that this test plays on a real socket."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.project.sources import ROOT

LOCK = """\
# a lock file
first==1.0 \\
    --hash=sha256:00
    # via second
second==2.0.1 ; sys_platform == 'darwin' \\
    --hash=sha256:00
"""
ADVISORIES = {
    "GHSA-real": {"id": "GHSA-real", "summary": "Runs what it reads"},
    "GHSA-gone": {"id": "GHSA-gone", "summary": "A mistake", "withdrawn": "2026-01-01T00:00:00Z"},
}
Answers = Callable[[str, Any], tuple[int, Any]]


class Advisories:
    """Knows `known` (advisory ids by package and version), in the form of OSV's API."""

    def __init__(self, known: dict[tuple[str, str], list[str]]):
        self.known = known

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/v1/querybatch":
            details = ADVISORIES.get(path.removeprefix("/v1/vulns/"))
            return (404, {}) if details is None else (200, details)
        assert all(query["package"]["ecosystem"] == "PyPI" for query in body["queries"])
        asked = [(query["package"]["name"], query["version"]) for query in body["queries"]]
        assert asked == [("first", "1.0"), ("second", "2.0.1")]
        ids = [self.known.get(pin) for pin in asked]
        return 200, {"results": [{"vulns": [{"id": name} for name in each]} if each else {} for each in ids]}


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[Callable[[Answers], tuple[int, str]]]:
    """Runs the script against a service that answers so: exit code and output."""
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK)
    servers: list[ThreadingHTTPServer] = []

    def run(answers: Answers) -> tuple[int, str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                status, answer = answers(self.path, json.loads(self.rfile.read(length)) if length else None)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return audited(f"http://127.0.0.1:{servers[-1].server_port}/v1", lock)

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def audited(service: str, lock: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts/audit.py"), "--service", service, "--lock", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_nothing_known_passes(audit) -> None:
    assert audit(Advisories({})) == (0, "Known vulnerabilities: 0 in 2 locked packages.\n")


def test_a_known_vulnerability_fails_and_is_named(audit) -> None:
    code, said = audit(Advisories({("second", "2.0.1"): ["GHSA-gone", "GHSA-real"]}))
    assert code == 1
    assert said.splitlines()[1:] == ["  second 2.0.1: GHSA-real Runs what it reads"]


def test_a_known_vulnerability_without_details_fails(audit) -> None:
    code, said = audit(Advisories({("first", "1.0"): ["GHSA-bare"]}))
    assert code == 1 and "first 1.0: GHSA-bare" in said


def test_a_withdrawn_advisory_passes(audit) -> None:
    assert audit(Advisories({("first", "1.0"): ["GHSA-gone"]}))[0] == 0


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (503, {}),
        (200, b"<html>Sign in to this network</html>"),
        (200, []),
        (200, {"results": [{}]}),
        (200, {"results": [{}, {"vulns": [{}]}]}),
        (200, {"results": [{}, 5]}),
    ],
)
def test_an_answer_that_is_none_is_not_taken_for_a_pass(audit, status, answer) -> None:
    code, said = audit(lambda path, body: (status, answer))
    assert code == 3 and "NOT CHECKED" in said


def test_a_service_that_is_not_reached_is_said(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK)
    code, said = audited("http://127.0.0.1:1/v1", lock)
    assert code == 3 and "NOT CHECKED" in said and "http://127.0.0.1:1/v1" in said


@pytest.mark.parametrize(("code", "passes"), [(0, True), (3, True), (1, False), (2, False)])
def test_the_long_check_goes_on_only_where_nothing_is_known(code: int, passes: bool) -> None:
    [line] = [line for line in (ROOT / "scripts/check").read_text().splitlines() if "audit.py" in line]
    done = subprocess.run(["bash", "-ec", f"python() {{ return {code}; }}; python=python; {line}"], check=False)
    assert (done.returncode == 0) is passes
