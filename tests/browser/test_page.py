"""The page in a real browser, over the demo checkpoint: it follows a load, cancels, chats, and is usable by all."""

import base64
import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.running import Running, eventually
from vllm_mlx.runner.checkpoint import DEMO_PATH

from ..server.watched import engine_served, load

playwright = pytest.importorskip("playwright.sync_api", reason="needs the `browser` extra")
pytestmark = pytest.mark.browser
expect = playwright.expect
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=shutil.which("chromium"))
        yield found
        found.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kept = tmp_path_factory.mktemp("kept")
    with engine_served(DEMO_PATH, max_num_seqs=8, cache_dir=str(kept), cache_disk_bytes=10**9) as running:
        yield running


@pytest.fixture
def page(browser, server):
    """Fails its test if the browser's console had anything to complain about."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    asked: list[str] = []
    page.goto(server.url)
    page.get_by_text("Live").wait_for()
    yield page
    context.close()
    assert complaints == []
    assert all(url.startswith((server.url, "data:")) for url in asked)


def picture(page, name: str) -> None:
    """Where somebody wants to look: PAGE_PICTURES names a folder."""
    if folder := os.environ.get("PAGE_PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def send(page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def last_answer(page) -> str:
    page.locator("#messages[aria-busy=false]").wait_for()
    return page.locator("#messages article.assistant .text").last.inner_text()


def test_it_follows_a_load_of_eight_and_cancels_them(page, server: Running) -> None:
    texts = [f"Once there were {number} of them, and they went on. " * 20 for number in range(8)]
    thread = threading.Thread(target=load, args=(server.url, texts), kwargs={"max_tokens": 3500})
    thread.start()
    rows = page.locator("#requests tr")
    expect(rows).to_have_count(8, timeout=WAIT_MS)
    page.locator("[data-name=phase]", has_text="generation").first.wait_for()
    page.wait_for_timeout(2500)
    picture(page, "load-light")
    page.emulate_media(color_scheme="dark")
    picture(page, "load-dark")
    for request_id in [row.get_attribute("data-id") for row in rows.all()]:
        page.get_by_role("button", name=f"Cancel {request_id}").press("Enter")
    expect(rows).to_have_count(0, timeout=WAIT_MS)
    page.locator("#no-requests").wait_for()
    thread.join(60)
    assert not thread.is_alive()
    page.locator("#errors li").first.wait_for()
    assert "cancelled on the server" in page.locator("#errors li").first.inner_text()


def test_it_chats_in_text_and_shows_thoughts_folded(page) -> None:
    send(page, "Who are you?")
    assert len(last_answer(page)) > 10
    note = page.locator("#messages article.assistant p").last.inner_text()
    assert "prompt tokens" in note and "of reply" in note
    send(page, "What is 2 + 3?")
    assert "5" in last_answer(page)
    page.locator("#cache rect").first.wait_for(state="attached")
    page.locator("#replies tr").nth(1).wait_for()
    picture(page, "chat")


def test_it_says_what_is_kept_on_disk(page) -> None:
    send(page, "Count to 9.")
    last_answer(page)
    page.locator("#disk rect").first.wait_for(state="attached")
    assert "are kept in" in page.locator("#disk-summary").inner_text()
    assert page.locator("#disk-held").get_attribute("aria-label").endswith("of 1.00 GB, 0 %")
    assert "Written today" in page.locator("#disk-written-text").inner_text()
    picture(page, "disk")


def test_who_opens_it_later_sees_what_was(page, server: Running) -> None:
    eventually(lambda: len(page.request.get(f"{server.url}/v1/status/history").json()["data"]) >= 5)
    page.reload()
    page.locator("#throughput path").first.wait_for(state="attached")
    assert page.locator("#throughput path").first.get_attribute("d").count("L") >= 4


def test_it_chats_about_an_image(page) -> None:
    page.locator("#images-field").wait_for(state="visible")
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (220, 20, 20)).save(buffer, "PNG")
    page.get_by_label("Images", exact=True).set_input_files(
        {"name": "red.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    )
    page.locator(".attached img").wait_for()
    send(page, "What colour is this?")
    assert last_answer(page).strip()
    source = page.locator("#messages article.user img").get_attribute("src")
    assert base64.b64decode(source.partition(",")[2]) == buffer.getvalue()
    picture(page, "image")


def test_words_are_shown_as_words(page) -> None:
    send(page, "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>")
    last_answer(page)
    assert "<script>" in page.locator("#messages article.user .text").last.inner_text()
    assert page.title() == "vllm-mlx"


def test_it_fits_a_telephone(page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    send(page, "Count to 5.")
    last_answer(page)
    page.locator("#cache text").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("throughput", "cache"):  # drawn anew every second, every five
        height = f"document.querySelector('#{name} text').getBoundingClientRect().height"
        eventually(lambda height=height: page.evaluate(height) >= 10)
    picture(page, "narrow")


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_stands_in_anyone_s_way(page, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the `browser` extra")
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.locator("#tiles dd").first.wait_for()
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


def test_it_asks_for_the_key_and_shows_nothing_without(browser, checkpoint) -> None:
    with engine_served(checkpoint("qwen3"), options={"api_keys": ("right",)}) as running:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(running.url)
        dialog = page.get_by_role("dialog")
        for key in ("wrong", "right"):
            dialog.get_by_label("API key", exact=True).fill(key)
            assert page.locator("#tiles dd").count() == 0
            page.keyboard.press("Enter")
            page.wait_for_timeout(500)
        page.get_by_text("Live").wait_for()
        assert "tokens of context" in page.locator("#model").inner_text()
        page.close()
