"""Chromium, for the tests of the page."""

import shutil
from collections.abc import Iterator

import pytest

OTHER_HOST = "mac.example"  # a page over plain http from another machine has no clipboard


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the `browser` extra")
    with playwright.sync_playwright() as started:
        rules = f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1"
        found = started.chromium.launch(executable_path=shutil.which("chromium"), args=[rules])
        yield found
        found.close()
