"""The page of a server whose model two ranks run, in a real browser."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_processes import macs, reply

playwright = pytest.importorskip("playwright.sync_api", reason="needs the `browser` extra")
pytestmark = pytest.mark.browser
expect = playwright.expect
WAIT_MS = 60_000
expect.set_options(timeout=WAIT_MS)


def test_each_of_several_macs_is_a_row(browser, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with macs(tmp_path, checkpoint("qwen3")) as both:
        both.start()
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(both.url)
        rows = page.get_by_role("region", name="Table of the Macs").locator("tbody tr")
        expect(rows).to_have_count(2)
        reply(both.url, list(range(20, 60)), 20)
        for rank in range(2):
            number, host, memory, plan, behind, sum_s = rows.nth(rank).locator("td").all()
            expect(number).to_have_text(str(rank))
            expect(host).to_have_text("127.0.0.1")
            expect(memory).to_have_text(re.compile(r"^[\d.]+ .B of [\d.]+ .B$"))
            expect(plan).to_have_text(re.compile(r"^[1-9]\d+$"))
            expect(behind).to_have_text("0")
            expect(sum_s).to_have_text(re.compile(r"^\d+\.\d\d ms$"))
        for width in (1280, 320):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
