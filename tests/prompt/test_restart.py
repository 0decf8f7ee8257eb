"""After a restart, the next turn is rendered as it would have been without one: ids, points, messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import write_tokenizer
from tests.support.drawing import examples
from tests.support.rows import cases
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.messages import ReasoningPart
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.kept import Memories
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor

from .template_variants import TEMPLATE_VARIANTS
from .test_any_conversation import turns
from .turns import ECHOES, Session, generate, letter_by_letter, make_processor, system, user

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
SALT = "tenant/"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    write_tokenizer(folder, "qwen3")
    return {name: Tokenizer.load(folder, chat_template=template) for name, template in TEMPLATE_VARIANTS.items()}


def memories_in(root: Path, fingerprint: str, *, cap_bytes: int = 1 << 34, daily_bytes: int = 1 << 34) -> Memories:
    folder = Folder(root, max_bytes=1 << 34, daily_bytes=daily_bytes, floor_bytes=0)
    memories = Memories.at(folder, fingerprint, cap_bytes=cap_bytes)
    folder.close()  # what is remembered opens it again
    return memories


@contextmanager
def started(folder: Path, tokenizer: Tokenizer, **options: Any) -> Iterator[RequestProcessor]:
    """What a server has of prompts, from its start to its clean stop."""
    memories = memories_in(folder, "f1", **options)
    try:
        yield make_processor(tokenizer, memories=memories)
    finally:
        memories.close()


def seen(prepared: PreparedRequest) -> tuple[Any, ...]:
    assert prepared.chat is not None
    return prepared.prompt, prepared.chat.boundaries, prepared.chat.request.messages


def ids_held(processor: RequestProcessor) -> int:
    """The ids of all objects that the remembered replies refer to."""
    entries = {id(link): link for entry in processor.replies.entries for link in entry.chain()}
    return sum(len(entry.tail) + len(entry.reply.token_ids) for entry in entries.values())


def in_a_loop(processor: RequestProcessor, number: int, **options: Any) -> Session:
    session = Session(processor, messages=(system("Be kind."), user(f"Read file {number}.")), **options)
    for _ in range(3):
        session.answer(CALL)
        session.give_results("its content")
    return session


@pytest.mark.parametrize("echo", cases(ECHOES, ["verbatim", "arguments in another order, other ids"]))
@pytest.mark.parametrize("variant", ["keeps reasoning", "after the last question", "opens the thought"])
def test_the_next_turn_is_the_same(tokenizers: dict[str, Tokenizer], tmp_path: Path, variant: str, echo: str) -> None:
    tokenizer = tokenizers[variant]
    with started(tmp_path, tokenizer) as first:
        session = in_a_loop(first, 1, echo=ECHOES[echo])
        expected = seen(session.prepare())
        kept = first.kept_tokens(session.turns[-1].prepared, session.turns[-1].reply)
        num_ids = ids_held(first)
    with started(tmp_path, tokenizer) as second:
        session.processor = second
        prepared = session.prepare()
        assert seen(prepared) == expected
        assert ids_held(second) == num_ids, "bases are shared"
        reply = generate(second, prepared, letter_by_letter(tokenizer, CALL), FinishReason.STOP)
        second.remember(prepared, reply)
        assert second.kept_tokens(session.turns[-1].prepared, session.turns[-1].reply) == kept
    with started(tmp_path, tokenizer) as third:
        session.processor = third
        assert seen(session.prepare()) == expected
    forgetful = seen(Session(make_processor(tokenizer), messages=session.messages).prepare())
    assert forgetful != expected or variant == "opens the thought", "it matters"


@settings(max_examples=examples(8), deadline=None)
@given(conversation=st.lists(turns(), min_size=1, max_size=3), variant=st.sampled_from(sorted(TEMPLATE_VARIANTS)))
def test_any_next_turn_is_the_same(
    tokenizers: dict[str, Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
    conversation: list[dict[str, Any]],
    variant: str,
) -> None:
    if variant in ("gemma", "strict roles", "tools last"):
        return
    folder = tmp_path_factory.mktemp("disk")
    lasting = make_processor(tokenizers[variant])  # the oracle: it is never started again
    one = Session(lasting, messages=(system("Be kind."), user("Go.")))
    for turn in conversation:
        with started(folder, tokenizers[variant]) as processor:
            prepared = one.prepare()
            one.processor = processor
            assert seen(one.prepare()) == seen(prepared)
            one.processor, one.echo, one.encode = lasting, ECHOES[turn["echo"]], turn["encode"]
            text = turn["reply"] if turn["is_cut"] else turn["reply"] + "<|im_end|>"
            done = one.answer(text, FinishReason.LENGTH if turn["is_cut"] else FinishReason.STOP)
            processor.remember(done.prepared, done.reply)
        if done.reply.calls and done.reply.is_complete and not turn["interrupts"]:
            one.give_results(*[turn["follow"]] * len(done.reply.calls))
        else:
            one.ask(turn["follow"])


def test_nothing_is_found_under_another_salt_or_checkpoint(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers["keeps reasoning"]
    drops = ECHOES["reasoning dropped"]
    with started(tmp_path, tokenizer) as first:
        session = in_a_loop(first, 1, echo=drops, cache_salt="one/")
        expected = seen(session.prepare())
    with started(tmp_path, tokenizer) as second:
        session.processor = second
        assert seen(session.prepare()) == expected
        other = Session(second, messages=session.messages, cache_salt="two/").prepare()
        assert other.compared is not None and other.compared.last is None
        assert other.chat is not None and not any(
            isinstance(part, ReasoningPart) for message in other.chat.request.messages or () for part in message.parts
        )
    memories = memories_in(tmp_path, "f2")
    session.processor = make_processor(tokenizer, memories=memories)
    assert seen(session.prepare()) != expected
    memories.close()


def test_a_cleared_salt_is_forgotten_and_its_next_turn_is_kept_again(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    tokenizer = tokenizers["keeps reasoning"]
    memories = memories_in(tmp_path, "f1")
    processor = make_processor(tokenizer, memories=memories)
    sessions = [in_a_loop(processor, number, cache_salt=f"{number}/") for number in range(2)]
    assert memories.journals is not None and memories.journals.flush()
    memories.clear("1/")
    assert memories.journals.flush()
    expected = [seen(session.prepare()) for session in sessions]
    memories.close()
    with started(tmp_path, tokenizer) as second:
        for session in sessions:
            session.processor = second
        assert seen(sessions[0].prepare()) == expected[0] and seen(sessions[1].prepare()) != expected[1]

    memories = memories_in(tmp_path, "f1")
    processor = make_processor(tokenizer, memories=memories)
    session = in_a_loop(processor, 7, cache_salt="1/")
    assert memories.journals is not None and memories.journals.flush()
    memories.clear("")
    session.answer(CALL)
    session.give_results("more")
    expected_next = session.prepare()
    memories.close()
    with started(tmp_path, tokenizer) as third:
        session.processor = third
        prepared = session.prepare()
        assert prepared.prompt.token_ids == expected_next.prompt.token_ids, "its ids are whole without the cleared ones"
        assert seen(prepared)[1] == seen(expected_next)[1]


def test_without_room_to_write_prompts_are_the_same(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers["keeps reasoning"]
    plain = in_a_loop(make_processor(tokenizer), 1)
    for options in ({"daily_bytes": 0}, {"cap_bytes": 0}):
        with started(tmp_path / next(iter(options)), tokenizer, **options) as processor:
            assert seen(in_a_loop(processor, 1).prepare())[0] == seen(plain.prepare())[0]
