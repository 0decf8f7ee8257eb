"""Parsers of installed packages: the page's example works, and no package runs code that the operator did not name."""

import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guidance.guided_sampler import GuidedSampler
from tests.guidance.random_sampler import RandomSampler
from tests.server.watched import engine_served
from tests.support.rows import row
from tests.support.running import eventually
from vllm_mlx.core.config import EngineConfig, ReasoningStrings
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.events import Finished, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Guide, JsonSchema, Request, SamplingParams
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.pipeline import merged
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor
from vllm_mlx.prompt.reply_formats import GROUP, reply_formats

PAGE = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")
TEXT, CODE, PROJECT = (
    re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]
    for language in ("text", "python", "toml")  # type: ignore[index]
)
DAYS = {"type": "integer", "minimum": 0, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec("get_weather", None, WEATHER),)
MESSAGES = (Message("user", (TextPart("hi"),)),)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package into the environment as an installer does: its module, and the metadata of its entry points."""

    def add(package: str = "acme-parser", code: str = CODE, parsers: dict[str, str] | None = None) -> None:
        site = tmp_path / package
        module = package.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(code, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        if parsers is None:
            parsers = tomllib.loads(PROJECT)["project"]["entry-points"][GROUP]
        lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in parsers.items())]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(site)

    yield add
    for module in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[module]


def formats(tokenizer: Tokenizer, reasoning: str = "acme", tools: str = "acme", **settings: Any) -> Any:
    config = EngineConfig(model="m", reasoning_parser=reasoning, tool_call_parser=tools, **settings)
    return reply_formats(config, tokenizer)


def processor(tokenizer: Tokenizer, reasoning: str = "acme", tools: str = "acme", **settings: Any) -> RequestProcessor:
    return RequestProcessor(
        tokenizer,
        EngineConfig(model="m", **settings),
        Path("/nowhere"),
        formats=formats(tokenizer, reasoning, tools, **settings),
        max_model_len=4096,
        vocab_size=tokenizer.vocab_size,
    )


def read(made: RequestProcessor, prepared: PreparedRequest, text: str, step: int) -> list[Any]:
    """The reply with this text, some tokens at a time, as its events. Without the last."""
    output = made.output(prepared)
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    events: list[Any] = []
    for start in range(0, len(ids), step):
        events += output.feed([TokenOutput(seq_id=0, token_id=token_id) for token_id in ids[start : start + step]])
    *events_at_end, finished = output.finish(FinishReason.STOP)
    assert isinstance(finished, Finished)
    return merged([*events, *events_at_end])


@row("S2-1")
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_example_of_the_page_reads_its_text(install: Install, qwen: Tokenizer, step: int) -> None:
    install()
    made = processor(qwen)
    prepared = made.prepare(Request(request_id="r", messages=MESSAGES, tools=TOOLS))
    reasoning, start, arguments, _ = read(made, prepared, TEXT, step)
    assert reasoning == ReasoningDelta("Rome, two days.")
    assert isinstance(start, ToolCallStart) and start.name == "get_weather"
    assert isinstance(arguments, ToolCallDelta) and json.loads(arguments.arguments) == {"city": "Rome", "days": 2}
    assert (made.formats.reasoning_name, made.formats.calls_name) == ("acme", "acme")


@row("S2-1")
@pytest.mark.parametrize("is_one_token", [False, True])
def test_calls_are_forced_and_reasoning_bounded_in_a_format_of_a_package(install: Install, is_one_token: bool) -> None:
    install()
    tags = ("<acme:think>", "</acme:think>", "<acme:call>", "</acme:call>")
    sampler = RandomSampler(tags if is_one_token else ())
    found = formats(sampler.tokenizer)
    guided = GuidedSampler(sampler, found.replies.reasoning, found.replies.calls)
    num_read = 0
    for seed in range(12):
        ids = guided.reply(
            "<acme:think>",
            seed=seed,
            tools=TOOLS,
            choice=ToolChoice("required", "get_weather"),
            most=300,
            thinking_token_budget=5,
        )
        if ids is not None:
            [(name, arguments)] = guided.read("<acme:think>", ids, TOOLS).calls
            assert name == "get_weather" and arguments.keys() == {"city", "days"}
            num_read += 1
    assert num_read > 3


def test_a_package_that_nobody_named_runs_no_code(install: Install, qwen_folder: Path) -> None:
    install(code="raise SystemExit('this code ran')")
    template = "<acme:think><acme:call>{{ messages[0].content }}<think></think><tool_call>"
    tokenizer = Tokenizer.load(qwen_folder, chat_template=template)
    for reasoning, tools in (("auto", "auto"), ("none", "none"), ("qwen3", "hermes"), ("hf", "beam")):
        found = formats(tokenizer, reasoning, tools)
        assert found.reasoning_name in ("qwen3", None)
    assert "acme_parser" not in sys.modules
    with pytest.raises(ConfigError, match="amce is not known"):
        formats(tokenizer, "amce", "auto")
    assert "acme_parser" not in sys.modules


def test_no_package_takes_a_name_of_the_server(install: Install, qwen: Tokenizer) -> None:
    names = ("auto", "none", "hf", "qwen3", "hermes")
    install(code="raise SystemExit('this code ran')", parsers=dict.fromkeys(names, "acme_parser:FAMILY"))
    for name in ("auto", "none", "hf", "qwen3"):
        formats(qwen, name, "auto")
    for name in ("auto", "none", "hf", "hermes"):
        formats(qwen, "auto", name)
    assert "acme_parser" not in sys.modules


def test_the_code_that_runs_is_named_in_the_log(
    install: Install, qwen: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    with caplog.at_level(logging.INFO, logger="vllm_mlx"):
        formats(qwen, "acme", "auto")
    assert "(acme_parser:FAMILY, of acme-parser 1.0) runs code of that package" in caplog.text


BROKEN = {
    "raise ValueError('not today')": "not today",
    "FAMILY = 5": "a int, not a vllm_mlx.formats.Family",
    "OTHER = 5": "AttributeError",
    "from vllm_mlx.formats import Family\nFAMILY = Family('acme')": "reads tool calls only",
    f"{CODE}\nfrom dataclasses import replace\nFAMILY = replace(FAMILY, reasoning=tags('', '</t>'))": "lacks a tag",
    f"{CODE}\nfrom dataclasses import replace\nFAMILY = replace(FAMILY, reasoning=tags('<t>'))": "lacks a tag",
    f"{CODE}\nfrom dataclasses import replace\nFAMILY = replace(FAMILY, calls=replace(FAMILY.calls, writes=()))": (
        "does not say how calls are written"
    ),
}


@pytest.mark.parametrize(("code", "message"), BROKEN.items(), ids=BROKEN.values())
def test_what_is_no_parser_is_refused_at_the_start(install: Install, qwen: Tokenizer, code: str, message: str) -> None:
    install(code=code)
    with pytest.raises(ConfigError, match=re.escape(message)):
        formats(qwen, "acme", "auto")


def test_a_parser_of_reasoning_reads_no_calls(install: Install, qwen: Tokenizer) -> None:
    install(code=f"{CODE}\nfrom dataclasses import replace\nFAMILY = replace(FAMILY, calls=None)")
    assert formats(qwen, "acme", "hermes").reasoning_name == "acme"
    with pytest.raises(ConfigError, match="reads reasoning only"):
        formats(qwen, "acme", "acme")


def test_a_name_that_two_packages_have_is_refused(install: Install, qwen: Tokenizer) -> None:
    install("acme-parser")
    install("acme-other", parsers={"acme": "acme_other:FAMILY"})
    with pytest.raises(ConfigError, match=r"acme-other 1\.0, acme-parser 1\.0\. Uninstall all"):
        formats(qwen)


BREAKING = """
from vllm_mlx.formats import Family
from vllm_mlx.formats.bodies import Body
from vllm_mlx.formats.family import Calls, JsonCall, Opening, Spelling, ToolFormat


class Broken(Body):
    def __init__(self, context):
        super().__init__()

    def consume(self, text, *, final=False):
        raise ZeroDivisionError("a bug of the parser")


OPENINGS = tuple(Opening(letter, Broken, needs_tools=True) for letter in "abcdefghijklmnopqrstuvwxyz")
FAMILY = Family("acme", calls=Calls(ToolFormat(OPENINGS), (Spelling(JsonCall(), "a"),)))
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_a_parser_ends_the_reply_that_it_reads(
    install: Install, checkpoint: Callable[..., Path], stream: bool
) -> None:
    install(code=BREAKING)
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with engine_served(checkpoint("qwen3"), tool_call_parser="acme") as server, server.http() as client:
        expected = client.post("/v1/chat/completions", json=body).json()["choices"]
        broken = client.post("/v1/chat/completions", json={**body, "tools": tools, "stream": stream})
        assert broken.status_code == (200 if stream else 500)
        assert "server_error" in broken.text and "ZeroDivisionError" not in broken.text
        assert client.post("/v1/chat/completions", json=body).json()["choices"] == expected
        eventually(lambda: client.get("/v1/status").json()["num_running"] == 0)


# One judge of where reasoning begins and ends


@row("S2-1", "S3-7")
@pytest.mark.parametrize("reasoning", ["auto", "qwen3", "granite", "openai_gptoss"])
def test_own_tags_are_those_of_prompt_constraint_and_parser(qwen_folder: Path, reasoning: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>\n<ponder>"
    tokenizer = Tokenizer.load(qwen_folder, chat_template=template)
    strings = ReasoningStrings("<ponder>", "Enough.</think>")
    made = processor(tokenizer, reasoning, "none", reasoning_config=strings)
    guide = Guide(form=JsonSchema({"type": "integer"}))
    request = Request(request_id="r", messages=MESSAGES, sampling=SamplingParams(guide=guide))
    prepared = made.prepare(request)
    assert prepared.constraint is not None and prepared.constraint.reasoning is not None
    assert prepared.constraint.reasoning.is_open and prepared.prompt.starts_in_reasoning
    [end, *_] = made.formats.judge.tags.ends  # type: ignore[union-attr]
    assert read(made, prepared, f"hm{end}7", 1)[0] == ReasoningDelta("hm")


def test_where_the_operator_wants_no_parser_own_tags_bound_reasoning_alone(qwen: Tokenizer) -> None:
    made = processor(qwen, "none", "none", reasoning_config=ReasoningStrings("<think>", "</think>"))
    request = Request(request_id="r", messages=MESSAGES, sampling=SamplingParams(thinking_token_budget=3))
    prepared = made.prepare(request)
    assert prepared.constraint is not None
    assert read(made, prepared, "<think>hm</think>7", 1) == [TextDelta("<think>hm</think>7")]


# The rules that a checkpoint carries

RULES = {
    "fields": {
        "thinking": {"open": "<muse>", "close": "</muse>", "content": "text"},
        "tool_calls": {"open": "<do>", "close": "</do>", "content": "json"},
    }
}
DONE = '<muse>hm</muse><do>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</do>'


@pytest.fixture
def ruled(qwen_folder: Path, tmp_path: Path) -> Callable[[Any], Tokenizer]:
    """A tokenizer whose configuration has these rules."""

    def make(rules: Any, **options: Any) -> Tokenizer:
        for file in qwen_folder.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja"):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": rules}))
        return Tokenizer.load(tmp_path, **options)

    return make


@pytest.mark.parametrize("choice", ["response_template", "hf", "beam"])
def test_the_checkpoints_rules_read_its_replies(ruled: Any, choice: str) -> None:
    made = processor(ruled(RULES), choice, choice)
    prepared = made.prepare(Request(request_id="r", messages=MESSAGES, tools=TOOLS))
    reasoning, start, arguments, _ = read(made, prepared, DONE, 1)
    assert reasoning == ReasoningDelta("hm")
    assert isinstance(start, ToolCallStart) and start.name == "get_weather"
    assert isinstance(arguments, ToolCallDelta) and json.loads(arguments.arguments) == {"city": "Rome", "days": 2}
    assert (made.formats.reasoning_name, made.formats.calls_name) == ("response_template", "response_template")


def test_auto_follows_the_rules_where_nothing_else_tells_the_format(ruled: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    found = formats(ruled(RULES, chat_template=template), "auto", "auto")
    assert found.calls_name == "response_template"
    usual = formats(ruled(RULES), "auto", "auto")
    assert (usual.reasoning_name, usual.calls_name) == ("qwen3", "hermes")


def test_rules_that_cannot_be_read_are_refused_only_if_asked_for(ruled: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = ruled({"fields": {"tool_calls": {"open": "<do>", "content": "kv-lines"}}})
    with pytest.raises(ConfigError, match="kv-lines"):
        formats(tokenizer, "auto", "response_template")
    with caplog.at_level(logging.INFO):
        assert formats(tokenizer, "auto", "auto").calls_name == "hermes"
    assert "kv-lines" in caplog.text


def test_without_rules_their_names_mean_what_was_detected(qwen: Tokenizer) -> None:
    found = formats(qwen, "response_template", "hf")
    assert (found.reasoning_name, found.calls_name) == ("qwen3", "hermes")
