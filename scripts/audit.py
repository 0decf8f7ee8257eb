#!/usr/bin/env python3
"""Asks OSV, a service of security advisories, about every version in the lock files.

Exit code 0: nothing is known against them; 1: something is; 3: not checked, because the service gave no usable answer.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

SCRIPTS = Path(__file__).resolve().parent
LOCKS = (SCRIPTS / "requirements.lock", SCRIPTS / "requirements-test.lock")
SERVICE = "https://api.osv.dev/v1"
TIMEOUT_S = 20.0
FOUND, NOT_CHECKED = 1, 3
# Advisories that do not concern this project, by id: why not.
ACCEPTED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Pin:
    name: str
    version: str


@dataclass(frozen=True)
class Finding:
    pin: Pin
    advisory: str
    summary: str

    def __str__(self) -> str:
        return f"{self.pin.name} {self.pin.version}: {self.advisory} {self.summary}".rstrip()


class NoAnswer(Exception):
    """The service was not reached, or its answer cannot be used."""


def read_pins(locks: Iterable[Path]) -> list[Pin]:
    found = (re.findall(r"^([\w.-]+)==([\w.!+]+)", lock.read_text(encoding="utf-8"), re.MULTILINE) for lock in locks)
    return [Pin(*pin) for pins in found for pin in pins]


class Service:
    def __init__(self, client: httpx.Client):
        """`client`: its base URL is the service's."""
        self._client = client

    def findings(self, pins: list[Pin]) -> list[Finding]:
        """Return the known vulnerabilities. Raise NoAnswer."""
        queries = [{"package": {"ecosystem": "PyPI", "name": pin.name}, "version": pin.version} for pin in pins]
        results = self._ask("POST", "/querybatch", {"queries": queries}).get("results")
        if not isinstance(results, list) or len(results) != len(pins):
            raise NoAnswer("the service did not answer for every package")
        known = [(pin, advisory) for pin, result in zip(pins, results, strict=True) for advisory in _advisories(result)]
        findings = (self._finding(pin, advisory) for pin, advisory in known if advisory not in ACCEPTED)
        return [finding for finding in findings if finding is not None]

    def _finding(self, pin: Pin, advisory: str) -> Finding | None:
        """Return the details, or None for an advisory that was withdrawn."""
        try:
            details = self._ask("GET", f"/vulns/{advisory}")
        except NoAnswer:
            details = {}  # the vulnerability is known all the same
        return None if "withdrawn" in details else Finding(pin, advisory, str(details.get("summary", "")))

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=body).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise NoAnswer("the service answered no JSON object")
        return answer


def _advisories(result: Any) -> list[str]:
    """Return the ids in the answer about one package, which is empty where nothing is known."""
    try:
        return [str(advisory["id"]) for advisory in (result or {}).get("vulns", [])]
    except (AttributeError, KeyError, TypeError) as error:
        raise NoAnswer(f"an answer of unknown form: {result!r:.100}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", default=SERVICE, metavar="URL", help="address of an OSV API")
    parser.add_argument("--lock", type=Path, action="append", metavar="FILE", help="lock file; default: both of them")
    options = parser.parse_args()
    pins = read_pins(options.lock or LOCKS)
    try:
        with httpx.Client(base_url=options.service, timeout=TIMEOUT_S) as client:
            findings = Service(client).findings(pins)
    except NoAnswer as error:
        print(f"Known vulnerabilities: NOT CHECKED. {options.service} gave no usable answer ({error}).")
        return NOT_CHECKED
    print(f"Known vulnerabilities: {len(findings)} in {len(pins)} locked packages.", *findings, sep="\n  ")
    return FOUND if findings else 0


if __name__ == "__main__":
    sys.exit(main())
