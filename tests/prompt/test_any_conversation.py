"""Random conversations: what is spliced, kept and said, against renderings that know of no memory."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import write_tokenizer
from tests.support.drawing import examples
from tests.support.rows import cases
from vllm_mlx.core.events import FinishReason
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor

from .template_variants import TEMPLATE_VARIANTS
from .test_points import shared
from .turns import ECHOES, Session, Turn, canonical, letter_by_letter, make_processor, system, user

TEMPLATES = {
    name: TEMPLATE_VARIANTS[name] for name in TEMPLATE_VARIANTS if name not in ("gemma", "strict roles", "tools last")
}
# Words and spaces alone, so that texts without spaces can be compared; some look like parts of markup.
TEXTS = st.lists(st.sampled_from(["a", "é東", "🙂", " ", "\n", "think", "{", "<", "0", "the"]), max_size=6).map("".join)
VALUES = st.one_of(
    TEXTS, st.integers(-3, 3), st.booleans(), st.none(), st.lists(st.floats(-2, 2, width=16), max_size=2)
)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "text", "lines", "all"]), VALUES, max_size=3)
SPACES = st.sampled_from(["", " ", "\n"])


@st.composite
def json_calls(draw: st.DrawFn) -> str:
    separators = (draw(st.sampled_from([",", ", "])), draw(st.sampled_from([":", ": "])))
    call = {"name": draw(st.sampled_from(["read", "edit"])), "arguments": draw(ARGUMENTS)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False, separators=separators)}\n</tool_call>{draw(SPACES)}"


@st.composite
def replies(draw: st.DrawFn) -> str:
    thought = draw(st.none() | TEXTS)
    opened = "" if thought is None else f"<think>{draw(SPACES)}{thought}{draw(SPACES)}</think>{draw(SPACES)}"
    return opened + draw(TEXTS) + "".join(draw(st.lists(json_calls(), max_size=2)))


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "reply": draw(replies()),
        "echo": draw(st.sampled_from(sorted(ECHOES))),
        "encode": draw(st.sampled_from([canonical, letter_by_letter])),
        "is_cut": draw(st.booleans()),
        "follow": draw(TEXTS),
        "interrupts": draw(st.booleans()),
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    write_tokenizer(folder, "qwen3")
    return {name: Tokenizer.load(folder, chat_template=template) for name, template in TEMPLATES.items()}


def without_spaces(text: str) -> str:
    return re.sub(r"\s", "", text)


def check_said(forgetful: RequestProcessor, session: Session, prepared: PreparedRequest) -> None:
    """The prompt says what the template says of the replies as they were written, but for spacing.

    `forgetful` remembers no reply.
    """
    assert prepared.chat is not None
    request = prepared.chat.request
    fresh = forgetful.prepare(request)
    said = forgetful.tokenizer.decode(prepared.prompt.token_ids)
    assert without_spaces(said) == without_spaces(forgetful.tokenizer.decode(fresh.prompt.token_ids))
    assert fresh.chat is not None and prepared.chat.text == fresh.chat.text
    known = [turn.reply.message for turn in session.turns if turn.reply.is_complete]
    written = [message for message in request.messages or () if message.role == "assistant"]
    assert all(message in written for message in known)


def check_points(other: PreparedRequest, session: Session, done: Turn, prepared: PreparedRequest) -> None:
    """What was planned for the last prompt is what other prompts share with it."""
    before = done.prepared.prompt
    points = before.snapshot_points or (0,)
    assert shared(before.token_ids, other.prompt.token_ids) >= points[0]
    if session.messages[-1].role == "tool":
        assert shared(before.token_ids, prepared.prompt.token_ids) >= points[-1]


@pytest.mark.parametrize("variant", cases(TEMPLATES, ["opens the thought", "strips reasoning", "merges system"]))
@settings(max_examples=examples(4), deadline=None)
@given(conversation=st.lists(turns(), min_size=1, max_size=4))
def test_prompts_say_the_same_and_share_what_was_kept(
    tokenizers: dict[str, Tokenizer], variant: str, conversation: list[dict[str, Any]]
) -> None:
    processor, forgetful = (make_processor(tokenizers[variant]) for _ in range(2))
    other = Session(processor, messages=(system("Be kind."), user("Something else."))).prepare()
    session = Session(processor, messages=(system("Be kind."), user("Go.")))
    for turn in conversation:
        session.echo, session.encode = ECHOES[turn["echo"]], turn["encode"]
        if turn["is_cut"]:
            done = session.answer(turn["reply"], FinishReason.LENGTH)
        else:
            done = session.answer(turn["reply"] + "<|im_end|>")
        interrupts = turn["interrupts"] or not done.reply.is_complete
        if done.reply.calls and not interrupts:
            session.give_results(*[turn["follow"]] * len(done.reply.calls))
        else:
            session.ask(turn["follow"])
        prepared = session.prepare()
        check_said(forgetful, session, prepared)
        check_points(other, session, done, prepared)
        if not (done.reply.calls and interrupts):
            kept = processor.kept_tokens(done.prepared, done.reply)
            num_prompt = len(done.prepared.prompt.token_ids)
            assert max(kept, num_prompt) == max(shared(done.token_ids, prepared.prompt.token_ids), num_prompt)
