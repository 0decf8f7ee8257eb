"""RememberedReply replies: found in conversations, chained, bounded, shared by threads."""

import gc
import random
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType

import pytest

from vllm_mlx.core.messages import ImagePart, Message, Part, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.remembered import Boundary, KnownPrefix, RememberedReply
from vllm_mlx.prompt.reply_memory import ReplyMemory, first_key, next_key, text_digest

from .turns import Session, letter_by_letter, make_processor, user


def said(text: str, *more: ReasoningPart | ToolCallPart) -> Message:
    return Message("assistant", (*more, TextPart(text)))


def key_of(*messages: Message, salt: str = "") -> bytes:
    key = first_key(salt)
    for message in messages:
        key = next_key(key, message)
    return key


def entry_after(
    messages: tuple[Message, ...],
    reply: Message,
    *,
    text: str = "",
    base: RememberedReply | None = None,
    num_ids: int = 10,
) -> RememberedReply:
    base_tokens = 0 if base is None else base.num_prompt_tokens + len(base.reply.token_ids)
    return RememberedReply(
        key=key_of(*messages),
        text_length=len(text),
        text_digest=text_digest(text).digest(),
        base=None if base is None else KnownPrefix(base, base.text_length + 1, base_tokens),
        tail=array("I", range(base_tokens, base_tokens + num_ids)),
        reply=FinishedReply(
            message=reply, token_ids=array("I", range(base_tokens + num_ids, base_tokens + num_ids + 3))
        ),
    )


def chain(length: int, name: str, memory: ReplyMemory) -> tuple[list[Message], list[RememberedReply]]:
    """A conversation, each of whose replies was remembered on top of the one before it."""
    messages: list[Message] = []
    entries: list[RememberedReply] = []
    for number in range(length):
        messages.append(user(f"{name} {number}"))
        reply = said(f"reply {number}", ReasoningPart("hm"))
        text = "x" * (100 * number + 50)
        base = entries[-1] if entries else None
        entries.append(entry_after(tuple(messages), reply, text=text, base=base))
        memory.add(entries[-1], range(entries[-1].num_prompt_tokens))
        messages.append(reply)
    return messages, entries


def test_replies_take_the_place_of_what_the_client_sent() -> None:
    memory = ReplyMemory()
    messages, entries = chain(3, "a", memory)
    sent = [replace(m, parts=m.parts[-1:]) if m.role == "assistant" else m for m in messages]
    recalled = memory.recall("", sent)
    assert recalled.messages == tuple(messages)
    assert recalled.replies == tuple(entries)
    assert recalled.key == key_of(*messages)
    assert memory.recall("salt", sent).messages == tuple(sent)


def test_a_changed_message_makes_all_later_replies_unknown() -> None:
    memory = ReplyMemory()
    messages, entries = chain(3, "a", memory)
    messages[2] = user("something else")
    assert memory.recall("", messages).replies == tuple(entries[:1])


def test_the_longest_prompt_that_begins_the_text_wins() -> None:
    memory = ReplyMemory()
    messages, entries = chain(4, "a", memory)
    recalled = memory.recall("", messages)
    assert recalled.longest("x" * 1000) is entries[3]
    assert recalled.longest("x" * 349) is entries[2]
    assert recalled.longest("x" * 200 + "y" * 800) is entries[1]
    assert recalled.longest("y" * 1000) is None


def test_ids_come_from_the_whole_chain() -> None:
    _, entries = chain(4, "a", ReplyMemory())
    last = entries[-1]
    total = last.num_prompt_tokens + 3
    assert last.token_ids(total) == list(range(total))
    for end in range(total):
        assert last.token_ids(end) == list(range(end))
        assert last.token_id(end) == end


def test_a_base_may_be_used_in_part() -> None:
    _, [first] = chain(1, "a", ReplyMemory())
    second = replace(entry_after((), said("b"), base=first), base=KnownPrefix(first, 0, 5), tail=array("I", [50, 51]))
    assert second.token_ids(7) == [0, 1, 2, 3, 4, 50, 51]
    assert [second.token_id(index) for index in range(7)] == [0, 1, 2, 3, 4, 50, 51]


def test_boundaries_are_at_or_before_a_place() -> None:
    _, [first] = chain(1, "a", ReplyMemory())
    first = replace(first, boundaries=(Boundary(20, 4),))
    second = entry_after((), said("b"), text="x" * 150, base=first)
    assert [second.boundary_before(chars) for chars in (10, 20, 49, 50, 51, 149, 150, 999)] == [
        (0, 0), (20, 4), (20, 4), (50, 10), (51, 13), (51, 13), (150, 23), (150, 23)
    ]  # fmt: skip


def test_call_ids_tell_equal_replies_apart() -> None:
    memory = ReplyMemory()
    for call_id in ("c1", "c2"):
        reply = said("ok", ReasoningPart(call_id), ToolCallPart(call_id, "f", {"a": 1}))
        memory.add(entry_after((user("hi"),), reply), ())
    for call_id, reasoning in (("c1", "c1"), ("c2", "c2"), ("other", "c2")):
        recalled = memory.recall("", [user("hi"), said("ok", ToolCallPart(call_id, "f", {"a": 1}))])
        assert recalled.messages[1].parts[0] == ReasoningPart(reasoning)


@pytest.mark.parametrize("options", [{"max_replies": 40}, {"max_bytes": 120_000}])
def test_bounds_hold_and_bases_outlive_what_stands_on_them(options: dict[str, int]) -> None:
    memory = ReplyMemory(**options)
    rng = random.Random(1)
    conversations: list[tuple[list[Message], list[RememberedReply]]] = []
    for number in range(60):
        conversations.append(chain(rng.randint(1, 9), str(number), memory))
        held = memory.entries
        assert len(held) <= options.get("max_replies", 10**9)
        assert memory.num_bytes == sum(entry.num_bytes for entry in held) <= options.get("max_bytes", 10**9)
        assert all(entry.base is None or entry.base.entry in memory.entries for entry in held)
        assert sum(map(len, memory._recent._by_key.values())) == len(held) == len(memory)
        memory.recall("", rng.choice(conversations)[0])
    assert memory.recall("", conversations[-1][0]).replies == tuple(conversations[-1][1])


def test_what_is_used_stays() -> None:
    memory = ReplyMemory(max_replies=10)
    messages, entries = chain(3, "used", memory)
    for number in range(20):
        chain(2, str(number), memory)
        assert memory.recall("", messages).replies == tuple(entries)


def test_a_reply_whose_base_was_dropped_meanwhile_keeps_its_own_ids() -> None:
    memory = ReplyMemory(max_replies=1)
    _, [first] = chain(1, "a", memory)
    chain(1, "b", memory)
    later = entry_after((user("c"),), said("c"), text="x" * 90, base=first)
    memory.add(later, range(later.num_prompt_tokens))
    [entry] = memory.recall("", [user("c"), said("c")]).replies
    assert entry.base is None
    assert entry.token_ids(26) == later.token_ids(26)
    assert entry.boundary_before(60) == (first.text_length + 1, 13)


def test_a_reply_larger_than_the_memory_is_not_kept() -> None:
    memory = ReplyMemory(max_bytes=10_000)
    memory.add(entry_after((), said("x" * 10_000)), ())
    assert len(memory) == memory.num_bytes == 0


def test_texts_of_one_message_count_as_one() -> None:
    one, two = user("a\nb"), Message("user", (TextPart("a"), TextPart("b")))
    assert key_of(one) == key_of(two) != key_of(user("ab"))
    result = ToolResultPart("c", (TextPart("a"),))
    orders = [(TextPart("a"), result), (result, TextPart("a")), (TextPart("a"), ImagePart(b"1")), (ImagePart(b"2"),)]
    assert len({key_of(Message("user", parts)) for parts in orders}) == 4
    assert key_of(Message("user", (TextPart("\ud800"),)))


def test_threads_share_it() -> None:
    memory = ReplyMemory(max_replies=50)
    barrier = threading.Barrier(4)

    def work(name: str) -> None:
        barrier.wait()
        for number in range(50):
            messages, _ = chain(3, f"{name} {number}", memory)
            assert memory.recall("", messages).messages == tuple(messages)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, name) for name in "abcd"]:
            done.result()
    assert memory.num_bytes == sum(entry.num_bytes for entry in memory.entries)


def taken(value: object) -> int:
    """Bytes of all objects that are reached from it, each once; types and modules are not its own."""
    seen: dict[int, object] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType):
            seen[id(each)] = each
            waiting += gc.get_referents(each)
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize(
    "parts",
    [
        (TextPart("a" * 50_000),),
        (TextPart("é" * 50_000),),
        (ReasoningPart("東" * 50_000), TextPart("🙂" * 50_000)),
        (ToolCallPart("c", "f", {"a": [[] for _ in range(5_000)]}),),
        (ToolCallPart("c", "f", {str(number): {"x": number + 0.5} for number in range(5_000)}),),
        (ToolCallPart("c", "f", {"a": [f"{number}" for number in range(5_000)]}),),
    ],
)
def test_what_an_entry_takes_is_counted_as_it_is(parts: tuple[Part, ...]) -> None:
    entry = entry_after((), Message("assistant", parts), num_ids=50_000)
    entry = replace(entry, reply=replace(entry.reply, token_ids=array("I", range(60_000))))
    assert taken(entry) <= entry.num_bytes <= 1.5 * taken(entry)


def test_a_remembered_reply_holds_its_ids_as_numbers_of_four_bytes(qwen: Tokenizer) -> None:
    processor = make_processor(qwen)
    session = Session(processor, messages=(user("hi"),), encode=letter_by_letter)
    turn = session.answer("a" * 20_000 + "<|im_end|>")
    [entry] = processor.replies.entries
    assert list(entry.reply.token_ids) == list(turn.reply.token_ids)
    assert taken(entry.reply.token_ids) <= 4 * len(turn.reply.token_ids) + 200
    assert processor.replies.num_bytes >= taken(entry)


def test_the_key_of_a_message_of_very_many_texts_takes_little_time():
    def key_of(*texts: str) -> bytes:
        return next_key(first_key(""), Message("user", tuple(map(TextPart, texts))))

    start_s = time.thread_time()
    key = key_of(*["x" * 250] * 60_000)
    assert time.thread_time() - start_s < 10  # each text joined to those before takes minutes
    assert key == key_of("\n".join(["x" * 250] * 60_000))
