"""A reply memory that was read from its journal answers as the one that wrote it, whatever part is left."""

import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart
from vllm_mlx.disk.database import Database
from vllm_mlx.disk.kept import Journals
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.prompt.remembered import Boundary, KnownPrefix, RememberedReply, packed_ids, unpacked_ids
from vllm_mlx.prompt.reply_memory import RecalledConversation, ReplyMemory, text_digest

WORDS = st.text(st.characters(), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(ToolCallPart, WORDS, WORDS, st.dictionaries(WORDS, VALUES, max_size=3))
REPLIES = st.lists(st.builds(TextPart, WORDS) | st.builds(ReasoningPart, WORDS) | CALLS, max_size=3)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which of three conversations goes on
        REPLIES,
        st.booleans(),  # whether its next prompt is built on the ids of the last reply
        st.booleans(),  # whether the client leaves out the reasoning
    ),
    min_size=1,
    max_size=8,
)


class Client:
    """Three conversations whose replies a memory remembers."""

    def __init__(self, memory: ReplyMemory) -> None:
        self.memory = memory
        self.sent: list[list[Message]] = [[Message("user", (TextPart(f"go {number}"),))] for number in range(3)]

    def step(self, number: int, parts: list[Any], extends: bool, drops: bool) -> None:
        sent = self.sent[number]
        recalled = self.memory.recall(f"salt {number % 2}", sent)
        base = recalled.replies[-1] if recalled.replies and extends else None
        known = None if base is None else KnownPrefix(base, base.text_length, base.num_prompt_tokens + 1)
        text = "x" * (10 * len(sent))
        reply = Message("assistant", tuple(parts))
        prompt_ids = [*([] if known is None else known.entry.token_ids(known.num_tokens)), len(sent), 2**32 - 1]
        entry = RememberedReply(
            salt=f"salt {number % 2}",
            key=recalled.key,
            text_length=len(text),
            text_digest=text_digest(text).digest(),
            base=known,
            tail=array("I", prompt_ids[0 if known is None else known.num_tokens :]),
            boundaries=(Boundary(len(text), len(prompt_ids)),),
            reply=FinishedReply(message=reply, token_ids=array("I", range(number, number + 3))),
            starts_in_reasoning=drops,
        )
        self.memory.add(entry, prompt_ids)
        said = [part for part in parts if not (drops and isinstance(part, ReasoningPart))]
        sent += [Message("assistant", tuple(said)), Message("user", (TextPart("more"),))]


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[tuple[ReplyMemory, Journals]]:
    journals = Journals(Database(folder))
    try:
        yield ReplyMemory(journal=journals.open("replies"), **options), journals
    finally:
        journals.close()


def told(entry: RememberedReply) -> tuple[Any, ...]:
    num_tokens = entry.num_prompt_tokens + len(entry.reply.token_ids)
    return (
        [link.name for link in entry.chain()],
        entry.token_ids(num_tokens),
        [entry.boundary_before(chars) for chars in range(0, entry.text_length + 5, 5)],
        (entry.salt, entry.key, entry.text_length, entry.text_digest, entry.starts_in_reasoning),
        (entry.reply.message, repr(entry.reply.message), entry.reply.is_complete),
    )


def answers(memory: ReplyMemory, client: Client) -> list[Any]:
    """What a memory says of every start of every conversation. It does not count as a use of a reply."""
    before = memory.entries
    found: list[Any] = []
    for number, sent in enumerate(client.sent):
        for end in range(1, len(sent) + 1):
            recalled: RecalledConversation = memory.recall(f"salt {number % 2}", sent[:end])
            longest = recalled.longest("x" * 10 * end)
            found.append((recalled.messages, recalled.key, [told(entry) for entry in recalled.replies]))
            found.append(None if longest is None else longest.name)
    for entry in before:
        memory._recent.get(entry)
    return found


def order(memory: ReplyMemory) -> list[str]:
    return [entry.name for entry in memory.entries]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.sampled_from([3, 6, 100]))
def test_it_answers_as_the_original(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, list[Any], bool, bool]], max_replies: int
) -> None:
    folder = tmp_path_factory.mktemp("journals")
    with opened(folder, max_replies=max_replies) as (memory, _):
        client = Client(memory)
        for step in steps:
            client.step(*step)
        expected = order(memory)
        memory._journal = None  # what is asked now is not written any more
        entries = answers(memory, client)
    with opened(folder, max_replies=max_replies) as (memory, _):
        memory._wait()
        assert order(memory) == expected
        memory._journal = None
        assert answers(memory, client) == entries
        objects = {id(link) for entry in memory.entries for link in entry.chain()}
        assert len(objects) == len(memory), "bases are shared, and none is held beside"


STORY = [
    (0, [ReasoningPart("hm"), TextPart("a é🙂")], True, True),
    (1, [ToolCallPart("c1", "f", {"x": [1.5, None]})], True, False),
    (0, [TextPart("b")], True, False),
    (0, [ReasoningPart("hm"), ToolCallPart("c2", "f", {})], True, True),
    (2, [TextPart("c")], False, False),
    (0, [TextPart("d")], True, True),
    (1, [TextPart("e")], True, True),
]


@pytest.mark.parametrize("left", [3, 1])
def test_the_journal_has_the_replies_of_the_memory_and_no_others(tmp_path: Path, left: int) -> None:
    """Replies that a memory evicts leave the journal, when they are added and when a smaller memory is restored."""

    def kept(memory: ReplyMemory, journals: Journals) -> set[str]:
        assert journals.flush()
        with sqlite3.connect(tmp_path / "index.sqlite") as connection:
            found = {name for (name,) in connection.execute("SELECT name FROM kept")}
        connection.close()
        assert len(journals.open("replies")) == len(found)
        return found

    with opened(tmp_path, max_replies=3) as (memory, journals):
        client = Client(memory)
        for step in STORY:
            client.step(*step)
        assert kept(memory, journals) == set(order(memory)) and len(memory) == 3
    with opened(tmp_path, max_replies=left) as (memory, journals):
        memory.recall("", ())
        assert kept(memory, journals) == set(order(memory)) and len(memory) == left


def test_a_reply_that_is_gone_costs_what_stands_on_it(tmp_path: Path) -> None:
    """Whichever rows damage has taken: every chain that is left is complete."""
    with opened(tmp_path, max_replies=8) as (memory, journals):
        client = Client(memory)
        for step in STORY:
            client.step(*step)
        assert journals.flush()
        expected = {entry.name: told(entry) for entry in memory.entries}
        chains = {entry.name: [link.name for link in entry.chain()] for entry in memory.entries}
    for gone in expected:
        folder = tmp_path / gone
        folder.mkdir()
        (folder / "index.sqlite").write_bytes((tmp_path / "index.sqlite").read_bytes())
        with sqlite3.connect(folder / "index.sqlite") as connection:
            connection.execute("UPDATE kept SET value = value || 'x' WHERE name = ?", (gone,))
        connection.close()
        with opened(folder, max_replies=8) as (memory, _):
            memory._wait()
            memory._journal = None
            found = {entry.name: told(entry) for entry in memory.entries}
            lost = {name for name, chain in chains.items() if gone in chain}
            assert found == {name: what for name, what in expected.items() if name not in lost}
            answers(memory, client)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids(ids: list[int]) -> None:
    assert unpacked_ids(packed_ids(ids)) == array("I", ids)


def test_ids_take_little_room() -> None:
    ids = np.random.default_rng(0).integers(0, 150_000, 10_000).tolist()
    assert len(packed_ids(ids)) < 3.2 * len(ids)


@pytest.mark.parametrize("word", ["!", "AAAA", packed_ids([1, 2, 3])[:-4], "é"])
def test_what_cannot_be_unpacked_is_a_value_error(word: str) -> None:
    with pytest.raises(ValueError):
        unpacked_ids(word)
