"""The page in a real browser, over the demo checkpoint: it follows a load, cancels, chats, and is usable by all."""

import base64
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from PIL import Image

from tests.support.commands import address, served
from tests.support.running import Running, eventually
from vllm_mlx.runner.checkpoint import DEMO_PATH

from ..server.watched import engine_served, load
from .conftest import OTHER_HOST

playwright = pytest.importorskip("playwright.sync_api", reason="needs the `browser` extra")
pytestmark = pytest.mark.browser
expect = playwright.expect
WAIT_MS = 60_000
expect.set_options(timeout=WAIT_MS)
HOSTILE = """\
# Title

**bold** and *italic*, `code <b>`, <script>window.taken=1</script> <img src=x onerror="window.taken=1">
[good](https://example.com/a_(b)) [bad](javascript:window.taken=1) ![image](https://example.com/x.png)
[https://example.org](https://example.com/other) [data](data:text/html,<script>1</script>)

1. first
   - inner

     ```python
     print("<i>hello</i>")
     ```
2. second

| A | B |
|---|:-:|
| <svg onload=alert(1)> | [c](vbscript:x) |

> quoted

```html
<script>window.taken=1</script>
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kept = tmp_path_factory.mktemp("kept")
    options = {"host_names": (OTHER_HOST,), "served_model_names": ("demo", "alias")}
    disk = {"cache_dir": str(kept), "cache_disk_bytes": 10**9}
    with engine_served(DEMO_PATH, options=options, max_num_seqs=8, **disk) as running:
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
    own = (server.url, f"http://{OTHER_HOST}:{server.port}/", "data:")
    assert all(url.startswith(own) for url in asked)


def picture(page, name: str) -> None:
    """Where somebody wants to look: PAGE_PICTURES names a folder."""
    if folder := os.environ.get("PAGE_PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def answer(page, text: str) -> None:
    """Let the server's next replies be this text, in pieces of seven characters."""
    pieces = [{"choices": [{"delta": {"content": text[at : at + 7]}}]} for at in range(0, len(text), 7)]
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(headers=headers, body=body))


def opened(page) -> None:
    """Open all that is folded."""
    page.evaluate("document.querySelectorAll('main details').forEach((each) => { each.open = true; })")


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
    assert page.locator("#models").is_hidden() and page.get_by_text("Model", exact=True).last.is_hidden()
    picture(page, "chat")


def test_it_says_what_is_kept_on_disk(page) -> None:
    send(page, "Count to 9.")
    last_answer(page)
    page.locator("#disk rect").first.wait_for(state="attached")
    assert "are kept in" in page.locator("#disk-summary").inner_text()
    assert " of 1.00 GB, " in page.locator("#disk-held").get_attribute("aria-label")
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
    send(page, '<img src=x onerror="window.taken=1"><script>window.taken=1</script>')
    last_answer(page)
    assert "<script>" in page.locator("#messages article.user .text").last.inner_text()
    assert page.evaluate("window.taken") is None


def test_a_reply_is_shown_as_markdown_and_does_nothing(page) -> None:
    answer(page, HOSTILE)
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_label("Message")).to_be_focused()
    send(page, "Show it.")
    last_answer(page)
    reply = page.locator("#messages article.assistant .text").last
    for element, text in {
        "h4": "Title", "strong": "bold", "em": "italic", "p > code": "code <b>", "ol > li": "first", "ul > li": "inner",
        "li pre": 'print("<i>hello</i>")', "td": "<svg onload=alert(1)>", "blockquote": "quoted",
        "blockquote ~ .code pre": "<script>window.taken=1</script>",
    }.items():  # fmt: skip
        expect(reply.locator(element).first).to_contain_text(text)
    links = [(link.inner_text(), link.get_attribute("href")) for link in reply.locator("a").all()]
    other = "https://example.com/other"
    expected = [("good", "https://example.com/a_(b)"), ("image", "https://example.com/x.png"), (other, other)]
    assert links == expected
    assert {link.get_attribute("rel") for link in reply.locator("a").all()} == {"noopener noreferrer"}
    assert reply.locator("script, img, svg, iframe, [onerror], [onload]").count() == 0
    assert "[bad](javascript:" in reply.inner_text() and page.evaluate("window.taken") is None
    reply.locator("ol").get_by_role("button", name="Copy the code").click()
    page.get_by_label("Message").press("ControlOrMeta+v")
    expect(page.get_by_label("Message")).to_have_value('print("<i>hello</i>")')
    picture(page, "markdown")


def test_markdown_does_not_depend_on_where_a_stream_is_cut(page) -> None:
    differing = page.evaluate(
        """async (text) => {
          const { markdownView } = await import("/page/markdown.js");
          const place = () => document.createElement("div"), [growing, cuts] = [place(), []];
          const grow = markdownView(growing);
          for (let end = 0; end <= text.length; end += 1) {
            const whole = place();
            grow(text.slice(0, end));
            markdownView(whole)(text.slice(0, end));
            if (!growing.isEqualNode(whole)) cuts.push(end);
          }
          return cuts;
        }""",
        HOSTILE,
    )
    assert differing == []


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_HOST])
def test_what_connect_copies_works(page, server: Running, host: str) -> None:
    origin = f"http://{host}:{server.port}"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(origin)
    page.get_by_role("link", name="Connect", exact=True).click()
    assert page.evaluate("isSecureContext") is (host != OTHER_HOST)

    def copied(text: str) -> str:
        page.get_by_role("button", name=f"Copy {text}", exact=True).click()
        page.get_by_text("Copied").first.wait_for()
        page.get_by_label("Message").fill("")
        page.get_by_label("Message").press("ControlOrMeta+v")
        return page.get_by_label("Message").input_value()

    assert copied(f"vllm-mlx launch claude --url {origin}")
    base_url, anthropic_url, model = copied(f"{origin}/v1"), copied(origin), copied("demo")
    assert (base_url, anthropic_url, model) == (f"{origin}/v1", origin, "demo")
    page.get_by_role("button", name="Copy alias", exact=True).wait_for()
    if host == OTHER_HOST:
        return  # only the browser knows where that is
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    client = openai.OpenAI(base_url=base_url, api_key="any")
    assert "5" in client.chat.completions.create(model=model, messages=messages).choices[0].message.content
    other = anthropic.Anthropic(base_url=anthropic_url, api_key="any")
    assert "5" in other.messages.create(model=model, messages=messages, max_tokens=50).content[0].text
    picture(page, "connect")


def test_requests_are_shown_by_their_client_and_the_last_ten_replies_first(page, server: Running) -> None:
    with server.http(headers={"user-agent": "agent/1.2 (Mac; x)"}) as client:
        ask = {"prompt": "Once", "max_tokens": 1}
        ids = [client.post("/v1/completions", json=ask).json()["id"] for _ in range(11)]
    rows = page.locator("#replies tr")
    expect(rows.first.locator("td").nth(1)).to_have_attribute("title", f"agent/1.2 (Mac; x)\n{ids[-1]}")
    expect(rows).to_have_count(10)
    assert rows.first.locator("td").nth(1).inner_text() == "agent/1.2"
    assert rows.first.locator("td").nth(2).inner_text() == "completions"
    page.get_by_role("button", name="Show all").click()
    assert rows.count() > 10
    page.get_by_role("button", name="Show the last 10").click()
    expect(rows).to_have_count(10)


def test_nothing_is_shown_before_the_first_status(page, server: Running) -> None:
    held = []
    page.route("**/v1/status/stream", lambda route: held.append(route))
    page.reload()
    while not held:
        page.wait_for_timeout(50)
    assert page.locator("main").is_hidden() and page.locator("#connection").inner_text() == "Connecting…"
    held[0].continue_()
    page.locator("#tiles dd").first.wait_for()
    page.unroute("**/v1/status/stream")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(page, width: int) -> None:
    answer(page, HOSTILE + "x" * 500)
    page.set_viewport_size({"width": width, "height": 900})
    send(page, "y" * 500)
    last_answer(page)
    opened(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        picture(page, f"{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


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
    answer(page, HOSTILE)
    send(page, "Show it.")
    last_answer(page)
    opened(page)
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


def test_several_models_have_a_row_each_and_the_chat_asks_any(browser, checkpoint) -> None:
    names = {"coder": DEMO_PATH, "org/Small-4bit": checkpoint("qwen3", max_position_embeddings=256)}
    with served(*(f"{name}={path}" for name, path in names.items())) as (_, printed):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.goto(url := address(printed))
        coder, small = page.locator("#models tr").nth(0), page.locator("#models tr").nth(1)
        expect(small).to_contain_text("ready")
        assert page.locator("#model").inner_text() == ", ".join(names)
        page.request.post(f"{url}/v1/models/{list(names)[1]}/unload?wait=true")
        expect(small.locator("td").nth(1)).to_have_text("unloaded")
        expect(coder.locator("td").nth(1)).to_have_text("ready")
        for name in names:
            page.locator("#chat-model").select_option(name)
            send(page, "Who are you?")
            page.locator("#stop:disabled").wait_for()
            expect(page.locator("#replies tr").first.locator("td").nth(3)).to_have_text(name)
        expect(small.locator("td").nth(1)).to_have_text("ready")
        expect(small.locator("td").nth(9)).not_to_have_text("–")
        for width in (1280, 320):
            page.set_viewport_size({"width": width, "height": 900})
            picture(page, f"several-{width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the `browser` extra")
        assert axe.Axe().run(page).response["violations"] == []
        page.close()


def test_drafts_are_a_tile_once_some_were_verified(browser) -> None:
    with engine_served(DEMO_PATH, num_draft_tokens=3) as running, running.http() as client:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(running.url)
        page.locator("#tiles dd").first.wait_for()
        tile = page.locator("#more-tiles").get_by_text("Tokens a pass with drafts")
        assert tile.count() == 0
        assert page.get_by_text("Macs that run the model together").is_hidden()
        asked = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 30, "temperature": 0}
        told = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        client.post("/v1/chat/completions", json={**asked, "prediction": {"type": "content", "content": told}})
        page.get_by_text("More", exact=True).click()
        tile.wait_for()
        assert float(tile.locator("xpath=following-sibling::dd").inner_text()) > 1
        page.close()


def test_it_asks_for_the_key_and_shows_nothing_without(browser, checkpoint) -> None:
    with engine_served(checkpoint("qwen3"), options={"api_keys": ("right",)}) as running:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(running.url)
        dialog = page.get_by_role("dialog")
        for key in ("wrong", "wröng →"):
            dialog.get_by_label("API key", exact=True).fill(key)
            page.keyboard.press("Enter")
            expect(dialog.get_by_role("alert")).to_contain_text("key")
            assert page.locator("#tiles dd").count() == 0 and page.locator("main").is_hidden()
        picture(page, "key")
        dialog.get_by_label("API key", exact=True).fill("right")
        page.keyboard.press("Enter")
        page.get_by_text("Live").wait_for()
        assert page.locator("#errors li").count() == 0
        assert "Programs need an API key" in page.locator("#connect-key").text_content()
        assert "tokens of context" in page.locator("#model").inner_text()
        page.close()


def test_a_prompt_that_is_read_says_how_far_and_how_long(page) -> None:
    """In the table of requests and in the chat, which then says how fast the reply was written."""
    send(page, "Say: " + "word " * 9000)
    page.get_by_text(re.compile(r"Reading the prompt, [\d,]+ of [\d,]+")).wait_for()
    page.locator("#requests small").get_by_text(re.compile(r"[\d,]+ of [\d,]+")).wait_for()
    page.get_by_role("button", name="Stop").click()
    last_answer(page)
    assert page.get_by_text("Reading the prompt").count() == 0
    send(page, "Say: hello")
    last_answer(page)
    assert re.search(r"of reply, [\d.]+ tokens/s$", page.locator("#messages .muted").last.inner_text())


def test_a_server_that_is_gone_is_told_and_dims_the_page(browser) -> None:
    with served("demo") as (process, printed):
        page = browser.new_page()
        page.goto(address(printed))
        page.locator("#tiles dd").first.wait_for()
        assert page.locator("#tiles div").count() == 5
        process.kill()
        page.get_by_text("The server does not answer. It may have stopped: its terminal says why").wait_for(
            timeout=20_000
        )
        assert page.evaluate("document.body.classList.contains('gone')")
        picture(page, "gone")
        page.close()
