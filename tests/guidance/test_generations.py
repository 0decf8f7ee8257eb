"""Models that know nothing, made to answer by a schema or to call a tool: replies end, are valid, are read back.

Random weights write the worst replies. A few dozen always; a thousand with `-m full`.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from vllm_mlx.api.openai.decode import ReplySpec, decode_chat
from vllm_mlx.api.openai.schema import ChatCompletionBody
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.request import Request
from vllm_mlx.llm import LLM, Completion

from .schemas import SCHEMAS, TOOL_SETS, Schema, validate

FORMATS = (
    "hermes", "qwen3_xml", "glm45", "deepseek_v3", "deepseek_v32", "kimi_k2", "minimax_m2", "mistral", "llama3_json",
    "lfm2", "gemma4", "granite",
)  # fmt: skip
MAX_TOKENS = 600
_numbers = itertools.count()


def request(temperature: float, seed: int, **fields: Any) -> Request:
    """Another prompt for each seed. Reasoning is off, because random weights would not end it."""
    body = ChatCompletionBody.model_validate(
        {
            "messages": [{"role": "user", "content": f"Say something about number {seed}."}],
            "temperature": temperature,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
            "chat_template_kwargs": {"enable_thinking": False},
            **fields,
        }
    )
    return decode_chat(body, ReplySpec(reply_id=f"r{next(_numbers)}", model="m", created=0)).request


def by_schema(schema: Schema, temperature: float, seed: int) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return request(temperature, seed, response_format=form)


def by_tools(tools: dict[str, Schema], temperature: float, seed: int) -> Request:
    wire = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in tools.items()
    ]
    named = {"type": "function", "function": {"name": next(iter(tools))}}
    return request(temperature, seed, tools=wire, tool_choice=named if seed % 3 == 0 else "required")


def answers(llm: LLM, requests: Iterable[Request], at_once: int = 8) -> Iterator[Completion]:
    for group in _batched(requests, at_once):
        for output in llm._run_all(group):
            yield output.outputs[0]


def _batched(items: Iterable[Request], size: int) -> Iterator[list[Request]]:
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


@dataclass
class Tally:
    num_replies: int = 0
    num_finished: int = 0

    def add(self, reply: Completion) -> bool:
        self.num_replies += 1
        is_finished = reply.finish_reason is not FinishReason.LENGTH
        self.num_finished += is_finished
        return is_finished

    @property
    def share(self) -> float:
        return self.num_finished / self.num_replies


def check_schemas(llm: LLM, cases: list[tuple[Schema, float, int]], tally: Tally) -> None:
    for (schema, _, _), reply in zip(cases, answers(llm, (by_schema(*case) for case in cases)), strict=True):
        if tally.add(reply):
            validate(json.loads(reply.text), schema)


def check_tools(llm: LLM, cases: list[tuple[dict[str, Schema], float, int]], tally: Tally) -> None:
    for (tools, _, seed), reply in zip(cases, answers(llm, (by_tools(*case) for case in cases)), strict=True):
        if not tally.add(reply):
            continue
        assert reply.finish_reason is FinishReason.TOOL_CALLS
        assert reply.tool_calls and not reply.text.strip()
        for call in reply.tool_calls:
            validate(json.loads(call.arguments), tools[call.name])
        if seed % 3 == 0:
            assert [call.name for call in reply.tool_calls] == [next(iter(tools))]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def llm(request, checkpoint):
    with LLM(str(checkpoint(request.param)), max_model_len=4096) as loaded:
        yield loaded


def test_some_schemas(llm: LLM) -> None:
    tally = Tally()
    cases = [(schema, temperature, 5) for schema in SCHEMAS[::15] for temperature in (0, 1.2)]
    check_schemas(llm, cases, tally)
    assert tally.share >= 0.95


@pytest.mark.parametrize("name", FORMATS[::12])
def test_some_tools(checkpoint, name: str) -> None:
    tally = Tally()
    with LLM(str(checkpoint("qwen3")), max_model_len=4096, tool_call_parser=name) as llm:
        check_tools(llm, [(tools, seed % 2 * 1.2, seed) for seed, tools in enumerate(TOOL_SETS[::5])], tally)
    assert tally.share >= 0.95


def test_the_same_alone_and_beside_others(llm: LLM) -> None:
    """Guided rows and free ones, each of them as if it were alone."""
    guided = [by_schema(schema, 1.2, seed) for seed, schema in enumerate(SCHEMAS[3::20])]
    free = [request(1.2, seed, max_tokens=30) for seed in range(3)]
    mixed = [*guided, *free]
    together = list(answers(llm, mixed))
    alone = list(answers(llm, mixed, at_once=1))
    assert [reply.text for reply in together] == [reply.text for reply in alone]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_replies(checkpoint) -> None:
    """Sixty schemas five times greedy and hot, thirty sets of tools in twelve formats; eight at once."""
    assert (len(SCHEMAS), len(TOOL_SETS)) == (60, 30)
    schemas, tools = Tally(), Tally()
    with LLM(str(checkpoint("qwen3")), max_model_len=4096) as llm:
        cases = [(schema, seed % 2 * 1.2, seed) for schema in SCHEMAS for seed in range(11)]
        check_schemas(llm, cases, schemas)
    for name in FORMATS:
        with LLM(str(checkpoint("qwen3")), max_model_len=4096, tool_call_parser=name) as llm:
            check_tools(llm, [(each, seed % 2 * 1.2, seed) for seed, each in enumerate(TOOL_SETS)], tools)
    print(f"\nschemas: {schemas}, {schemas.share:.3f}; tools: {tools}, {tools.share:.3f}")
    assert schemas.num_replies + tools.num_replies >= 1000
    assert schemas.share >= 0.95
    assert tools.share >= 0.95
