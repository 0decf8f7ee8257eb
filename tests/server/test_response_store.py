"""What is kept of responses, and what goes."""

import asyncio
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_mlx.api.responses.decode import decode_response
from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.api.responses.replies import ResponseSpec
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.api.responses.stored import StoredResponse, as_input, item_list, stored
from vllm_mlx.core.events import TextDelta
from vllm_mlx.disk.database import Database
from vllm_mlx.disk.kept import Journals
from vllm_mlx.server.response_store import ResponseStore, ResponseStores

from .fakes import finished


def response(number: int, previous: int | None = None) -> StoredResponse:
    body = ResponsesBody.model_validate({"input": f"question {number}"})
    decoded = decode_response(body, ResponseSpec(reply_id=f"resp_{number}", model="tiny", created_at=1))
    fold = ResponseStream(decoded.reply)
    fold.feed(0, TextDelta(f"answer {number}"))
    fold.feed(0, finished())
    return stored(decoded.kept, fold.reply, None if previous is None else f"resp_{previous}")


def filled(count: int, **limits: int) -> ResponseStore:
    """A conversation of `count` responses."""
    store = ResponseStore(**limits)
    for number in range(count):
        store.put(response(number, number - 1 if number else None))
    return store


def test_a_conversation_is_all_that_was_said() -> None:
    conversation = filled(3).conversation("resp_2")
    assert conversation is not None and len(conversation) == 6
    assert [item["role"] for item in conversation] == ["user", "assistant"] * 3
    assert len(as_input(conversation)) == 6


def test_a_conversation_with_a_gap_is_none() -> None:
    store = filled(3)
    assert store.remove("resp_1") and not store.remove("resp_1")
    assert store.conversation("resp_2") is None and store.conversation("resp_9") is None
    assert len(store.input_of("resp_2")) == 1


def test_the_longest_unused_go_first() -> None:
    store = filled(2, max_responses=3)
    store.put(response(7))
    store.conversation("resp_1")  # and so resp_0 with it
    store.put(response(8))
    assert store.get("resp_7") is None and store.get("resp_0") is not None and store.get("resp_8") is not None


def test_bytes_are_bounded_too() -> None:
    size = response(0).num_bytes
    store = ResponseStore(max_bytes=size + size // 2)
    store.put(response(1))
    store.put(response(1))
    assert store.get("resp_1") is not None
    store.put(response(2))
    assert store.get("resp_1") is None and store.get("resp_2") is not None
    assert store.item(response(1).output[0]["id"]) is None and store.item(response(2).output[0]["id"]) is not None


def test_pages_of_items() -> None:
    items = [{"id": str(number)} for number in range(5)]
    page = item_list(items, limit=2, after=None, newest_first=True)
    assert ([item["id"] for item in page.data], page.has_more, page.last_id) == (["4", "3"], True, "3")
    page = item_list(items, limit=2, after="1", newest_first=False)
    assert [item["id"] for item in page.data] == ["2", "3"]
    empty = item_list([], limit=2, after=None, newest_first=False)
    assert (empty.data, empty.first_id, empty.has_more) == ([], None, False)


def test_small_elements_count_what_they_take() -> None:
    parts = [{"text": "x"}] * 10_000
    body = ResponsesBody.model_validate({"input": [{"type": "reasoning", "summary": parts}]})
    tracemalloc.start()
    kept = decode_response(body, ResponseSpec(reply_id="resp_1", model="tiny", created_at=1)).kept
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * taken < kept.num_bytes < 2 * taken


def test_a_disk_that_hangs_at_the_start_gives_responses_later(tmp_path: Path) -> None:
    """A request does not wait for ever; once the disk answers, responses of the last server are there."""
    with serving_stores(tmp_path) as (stores, _):
        asyncio.run(stores.of("ann")).put(response(1))
    goes_on, database = threading.Event(), Database(tmp_path)
    hanging = threading.Thread(target=database.run, args=(lambda connection: goes_on.wait(60),))
    hanging.start()
    with serving_stores(tmp_path, database) as (stores, journals):
        assert asyncio.run(stores.of("ann")).get("resp_1") is None
        asyncio.run(stores.of("ann")).put(response(2))
        goes_on.set()
        assert journals.flush()
        for number in (1, 2):
            assert asyncio.run(stores.of("ann")).get(f"resp_{number}") is not None
    hanging.join()


@contextmanager
def serving_stores(folder: Path, database: Database | None = None) -> Iterator[tuple[ResponseStores, Journals]]:
    journals = Journals(database or Database(folder), max_wait_s=0.1 if database else 10)
    try:
        yield ResponseStores(1, journals.open("responses")), journals
    finally:
        journals.close()
