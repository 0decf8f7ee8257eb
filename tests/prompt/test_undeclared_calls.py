"""Calls of tools that are not declared: the next prompt extends the reply that has them, in every family."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken

from tests.formats.families import FAMILIES as SPELLINGS
from tests.formats.families import Family
from tests.formats.test_each_family import CASES, reasoning_name
from tests.support.rows import row
from tests.support.tokenizers import byte_level_backend, save
from vllm_mlx.core.events import FinishReason
from vllm_mlx.formats.families import FAMILIES as PRODUCT
from vllm_mlx.formats.family import Family as ProductFamily
from vllm_mlx.formats.tokenizer import Tokenizer

from .template_variants import TEMPLATE_VARIANTS
from .turns import Session, Turn, make_processor, user

# The prompt opens what `opened` says, and a turn begins with it. The turns of calls are what the model wrote.
TEMPLATE = (
    "{{- tools | tojson if tools -}}{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.role == 'assistant' -%}{{- opened + closed -}}{%- endif -%}{{- message.content -}}"
    "{%- if message.tool_calls -%}{{- written -}}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + opened -}}{%- endif -%}"
)
REMOVED = ("rm", {"path": "/", "n": 3})
NewTokenizer = Callable[[str, bool], Tokenizer]
START = (user("Go."),)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> NewTokenizer:
    """A tokenizer with this template; with or without the tags of all families as tokens."""

    @cache
    def folder(has_tags: bool) -> Path:
        backend = byte_level_backend()
        tags = sorted({tag for family in SPELLINGS for tag in family.tokens} if has_tags else ())
        backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        return save(tmp_path_factory.mktemp("tokenizer"), backend, eos="<|im_end|>")

    return lambda template, has_tags: Tokenizer.load(folder(has_tags), chat_template=template)


def in_family(family: ProductFamily, tokenizer: Tokenizer, mode: str, written: str) -> Session:
    processor = make_processor(
        tokenizer,
        reasoning=reasoning_name(family) or "none",
        tools=family.call_choices[0],
        undeclared_calls=mode,
    )
    is_implied = family.reasoning is not None and family.reasoning.is_implied
    opened, closed = ("<think>", "</think>") if is_implied else ("", "")
    variables = {"opened": opened, "closed": closed, "written": written}
    return Session(processor, messages=START, template_kwargs=variables)


def extends(session: Session, turn: Turn) -> bool:
    return session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids


MODES = ("text", "call")
IN_MODES = [  # every run has each spelling in one mode
    pytest.param(*case.values, mode, id=f"{case.id}-{mode}", marks=() if mode == MODES[at % 2] else pytest.mark.full)
    for at, case in enumerate(CASES)
    for mode in MODES
]


@row("S0-11")
@pytest.mark.parametrize("has_tags", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(("family", "spelling", "mode"), IN_MODES)
def test_the_next_prompt_extends_it(
    tokenizer: NewTokenizer, family: ProductFamily, spelling: Family, mode: str, has_tags: bool
) -> None:
    calls = spelling.calls(REMOVED, REMOVED)
    session = in_family(family, tokenizer(TEMPLATE, has_tags), mode, calls)
    closed = "</think>" if family.reasoning is not None and family.reasoning.is_implied else ""
    turn = session.answer(f"{closed}So: {calls}<|im_end|>")
    assert "rm" in str(turn.reply.message)
    if turn.reply.calls:
        session.give_results(*["done"] * len(turn.reply.calls))
    else:
        session.ask("And now?")
    assert extends(session, turn)
    assert session.processor.kept_tokens(turn.prepared, turn.reply) == len(turn.token_ids)


CALL = '<tool_call>\n{"name": "rm", "arguments": {"path": "/"}}\n</tool_call>'


@pytest.mark.parametrize("variant", ["keeps reasoning", "trims", "merges system"])
@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(CALL, marks=pytest.mark.full),
        f"<think>\nhm\n</think>\n\n{CALL}\nWhat now?\n\n{CALL}",
        f"{CALL[:-20]}",  # the model ended inside the call
        '<tool_call>\n{"name": "rm", "arguments"\n</tool_call>\nso',  # no call
        "Done.</tool_call>",
    ],
)
def test_what_the_client_was_not_shown_stays_as_the_model_wrote_it(
    tokenizer: NewTokenizer, variant: str, reply: str
) -> None:
    if "<think>" in reply and variant == "merges system":
        return  # its template writes no reasoning
    session = Session(make_processor(tokenizer(TEMPLATE_VARIANTS[variant], False)), messages=START)
    turn = session.answer(reply + "<|im_end|>")
    assert not turn.reply.calls
    session.ask("And now?")
    assert extends(session, turn)


def test_a_call_that_the_limit_of_tokens_cut_stays(tokenizer: NewTokenizer) -> None:
    session = Session(make_processor(tokenizer(TEMPLATE_VARIANTS["keeps reasoning"], False)), messages=START)
    turn = session.answer(CALL[:-20], FinishReason.LENGTH)
    session.ask("And now?")
    assert extends(session, turn)


def test_the_tags_of_empty_reasoning_are_part_of_what_was_said(tokenizer: NewTokenizer) -> None:
    session = Session(make_processor(tokenizer(TEMPLATE_VARIANTS["keeps reasoning"], False)), messages=START)
    turn = session.answer(f"<think>\n\n</think>\n\n{CALL}<|im_end|>")
    session.ask("And now?")
    assert not extends(session, turn)


def test_an_edited_text_of_a_call_is_what_the_model_reads(tokenizer: NewTokenizer) -> None:
    session = Session(make_processor(tokenizer(TEMPLATE_VARIANTS["keeps reasoning"], False)), messages=START)
    session.answer(f"{CALL}<|im_end|>")
    session.messages[-1:] = [user("x")]
    session.ask("And now?")
    assert "<tool_call>" not in session.processor.tokenizer.decode(session.prepare().prompt.token_ids)


# gpt-oss writes each part of a reply as a message of its own.
HARMONY = (
    "{{- tools | tojson if tools -}}{%- for message in messages -%}{{- '<|start|>' + message.role -}}"
    "{%- if message.role == 'assistant' -%}{{- '<|channel|>final' -}}{%- endif -%}"
    "{{- '<|message|>' + message.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
RM = '<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{"path": "/"}<|call|>'


@pytest.mark.parametrize(
    "reply",
    [
        "<|channel|>final<|message|>Done.<|return|>",
        RM,
        f"<|channel|>commentary<|message|>I remove it.<|end|><|start|>assistant{RM}",
    ],
)
def test_messages_of_gpt_oss(tokenizer: NewTokenizer, tmp_path: Path, reply: str) -> None:
    backend = byte_level_backend()
    tags = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    ends = [backend.token_to_id("<|call|>"), backend.token_to_id("<|return|>")]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    gpt = Tokenizer.load(save(tmp_path, backend, eos="<|return|>"), chat_template=HARMONY)
    [family] = [family for family in PRODUCT if family.name == "gpt-oss"]
    session = in_family(family, gpt, "text", "")
    turn = session.answer(reply)
    session.ask("And now?")
    num_written = len(turn.token_ids) - 1  # the template ends the message with another token
    assert session.prepare().prompt.token_ids[:num_written] == turn.token_ids[:num_written]
