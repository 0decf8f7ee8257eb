"""A model that wants to call a tool that nobody declared calls a declared one, in every format with a marker."""

import pytest

from tests.support.rows import cases, row
from vllm_mlx.core.messages import ToolChoice, ToolSpec
from vllm_mlx.core.request import Choice, Guide, Request, TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.formats.families import CALL_FORMATS
from vllm_mlx.formats.families import FAMILIES as ROWS
from vllm_mlx.guidance.names import CheckpointNames, held_openings
from vllm_mlx.runner.row_constraint import RowConstraint

from ..formats.families import FAMILIES, Family
from .random_sampler import RandomSampler, sampler
from .scripted import ARGUMENTS, DECLARED, INVENTED, TOOLS, Scripted, Written, request, with_tokens

HELD = {  # by family: the markers behind which the name of a call is held; () if calls have no marker
    "gpt-oss": ("<|channel|>", "<|start|>", "to="),
    "gemma4": ("<|tool_call>",),
    "functiongemma": ("<start_function_call>",),
    "muse": ("<atem:function_calls>", "<atem:invoke"),
    "inkling": ("<|content_invoke_tool_json|>",),
    "plamo3": ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:begin_tool_request:plamo|>"),
    "k2_horizon": ("<ifm|tool_calls>", "<ifm|tool_call>"),
    "kimi_k3": ("<|open|>tools<|sep|>", "<|open|>call"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "cohere_command3": ("<|START_ACTION|>",),
    "minimax_m3": ("]<]minimax[>[<tool_call>", "]<]minimax[>[<invoke"),
    "minimax_m2": ("<minimax:tool_call>", "<invoke"),
    "dots": ("<dots_function_call>", "<invoke"),
    "deepseek_v41": ("<｜DSML｜ calls>", "<｜DSML｜ invoke"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", "<｜DSML｜invoke"),
    "deepseek_v32": ("<｜DSML｜function_calls>", "<｜DSML｜invoke"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "step3": ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    "seed_oss": ("<seed:tool_call>", "<function="),
    "longcat": ("<longcat_tool_call>",),
    "apertus": ("<|tools_prefix|>",),
    "internlm": ("<|action_start|>",),
    "gigachat3": ("<|message_sep|>", "<|function_call|>"),
    "minicpm5": ("<function name=",),
    "phi4_mini_json": ("functools[",),
    "hy_v3": ("<tool_calls:opensource>", "<tool_call:opensource>", "<tool_calls>", "<tool_call>"),
    "hy_v4": ("<tool_calls:opensource>", "<tool_call:opensource>", "<tool_calls>", "<tool_call>"),
    "glm45": ("<tool_call>",),
    "laguna": ("<tool_call>",),
    "llama4_pythonic": ("<|python_start|>",),
    "lfm2": ("<|tool_call_start|>",),
    "olmo3": ("<function_calls>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "granite-20b-fc": ("<function_call>",),
    "hunyuan_a13b": ("<tool_calls>",),
    "nemotron_nano_v2": ("<TOOLCALL>",),
    "ernie45": ("<tool_call>", "<function="),
    "step5": ("<tool_call>", "<function="),
    "qwen3_xml": ("<tool_call>", "<function="),
    "nemotron_v3": ("<tool_call>", "<function="),
    "step3p5": ("<tool_call>", "<function="),
    "granite_thinking_parser": ("<tool_call>", "<function="),
    "granite4": ("<tool_call>", "<function="),
    "mimo": ("<tool_call>", "<function="),
    "qwen3": ("<tool_call>", "<function="),
    "llama3_json": ("<|python_tag|>",),  # `{` and `[` alone begin a call only if it has the form of one
    "pythonic": (),
    "xlam": ("[TOOL_CALLS]", "<tool_call>"),
    "generic": (
        "<tool_call>", "<tool_calls>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "<function=",
        "<minimax:tool_call>", "<invoke",
        "<｜DSML｜function_calls>", "<｜DSML｜invoke", "<｜DSML｜tool_calls>", "<｜DSML｜invoke",
    ),
}  # fmt: skip
FREE = {"llama3_json", "pythonic", "xlam"}  # spelled below without a marker
FIRST = {family.name: number for number, family in reversed([*enumerate(FAMILIES)])}  # of the spellings of a family
SPELLINGS = [
    pytest.param(
        family,
        has_tokens,
        id=f"{family.name}-{number}-{'tokens' if has_tokens else 'text'}",
        marks=() if number == FIRST[family.name] and has_tokens == bool(family.tokens) else pytest.mark.full,
    )
    for number, family in enumerate(FAMILIES)
    for has_tokens in (True, False)
    if family.name not in FREE and (family.tokens or not has_tokens)
]


def sampler_of(family: Family, has_tokens: bool) -> RandomSampler:
    return sampler(family.tokens) if has_tokens else sampler()


def test_every_family_says_whether_its_names_are_held() -> None:
    for family in ROWS:
        if family.calls is not None:
            held = tuple(opening.marker for opening in held_openings(family.calls))
            assert held == HELD.get(family.name), family.name
            assert held or all(opening.is_common for opening in family.calls.reads.openings)
    assert set(HELD) == {family.name for family in ROWS if family.calls is not None}


@row("S4-33")
@pytest.mark.parametrize(("family", "has_tokens"), SPELLINGS)
def test_an_invented_name_becomes_a_declared_one(family: Family, has_tokens: bool) -> None:
    model = Scripted(sampler_of(family, has_tokens), family.name)
    written = model.write(f"Look: {family.calls((INVENTED, ARGUMENTS))}")
    assert written.changed_at is not None
    [name] = model.calls(written.ids)
    assert name in DECLARED


@pytest.mark.parametrize(("family", "has_tokens"), SPELLINGS)
def test_declared_names_stay_as_they_are_token_by_token(family: Family, has_tokens: bool) -> None:
    model = Scripted(sampler_of(family, has_tokens), family.name)
    for names in (("get",), ("get_weather",), ("get_weather_by_day", "get")):
        text = family.calls(*((name, ARGUMENTS) for name in names))
        written = model.write(text)
        assert written.changed_at is None and written.ids == model.ids(text)
        assert 0 < written.num_masks <= (50 if has_tokens else 80) * len(names)


@pytest.mark.parametrize(("family", "has_tokens"), SPELLINGS)
def test_the_name_of_a_further_call_is_held(family: Family, has_tokens: bool) -> None:
    model = Scripted(sampler_of(family, has_tokens), family.name)
    text = family.calls(("get_weather", ARGUMENTS), (INVENTED, ARGUMENTS))
    written = model.write(text)
    first, *others = model.calls(written.ids)
    assert first == "get_weather" and written.changed_at is not None
    assert (
        all(name in DECLARED for name in others)
        and len(others) == len(model.calls(model.ids(text.replace(INVENTED, "get")))) - 1
    )


TEXT = (
    'A <b>tag</b> <i>, {"name": "get_wealth", "arguments": {}}, [get_wealth(a=1)] and x<y.\n\nimport functools\n'
    'from functools import partial\n```json\n[1, {"name": 2}]\n```\nSend it to=you; <fun>ction</fun> ünï <ßx> 🙂 '
)


@pytest.mark.parametrize("has_tokens", [True, pytest.param(False, marks=pytest.mark.full)], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "family", {family.name: family for family in FAMILIES}.values(), ids=lambda family: family.name
)
def test_text_without_a_call_is_free(family: Family, has_tokens: bool) -> None:
    model = Scripted(sampler_of(family, has_tokens), family.name)
    if model.constraint(request()) is None:
        return
    written = model.write(TEXT)
    assert written.changed_at is None and written.ids == model.ids(TEXT)
    if has_tokens and family.tokens and "functools" not in str(HELD.get(family.name)):
        assert written.num_masks <= 1


@pytest.mark.parametrize(("family", "has_tokens"), [one for one in SPELLINGS if one.values[1]])
def test_arguments_stay_as_they_are(family: Family, has_tokens: bool) -> None:
    """What looks like a call inside a string is data, unless it is written with the tokens of one."""
    model = Scripted(sampler_of(family, has_tokens), family.name)
    inside = f'{family.inside} {{"name": "{INVENTED}"}} {INVENTED}( function={INVENTED}'
    text = family.calls(("get", {"city": inside}), ("get_weather", ARGUMENTS))
    assert model.write(text).ids == model.ids(text)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("qwen3_xml", "mimo", "minimax_m2", "muse")])
def test_a_value_that_holds_the_plain_tags_of_a_call_stays_as_it_is(family: Family) -> None:
    model = Scripted(sampler_of(family, bool(family.tokens)), family.name)
    tag = next(marker for marker in HELD[family.name][::-1] if marker not in family.tokens)
    value = f"{tag}{INVENTED}\n{tag} {INVENTED}"
    text = family.calls(("get", {"city": value}), ("get_weather", {"city": f"{value}\nwords"}))
    assert model.write(text).ids == model.ids(text)


def test_a_string_in_deep_arguments_is_data() -> None:
    """Work on a token does not grow with the brackets that are open, so no limit ends the call."""
    model = Scripted(sampler(("<tool_call>", "</tool_call>")), "hermes")
    deep = '[1, {"a": ' * 1200
    text = f'<tool_call>\n{{"name": "get", "arguments": {{"city": {deep}"<function={INVENTED}>"'
    assert model.write(text).ids == model.ids(text)


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Oslo"}}}', '{"city": "Oslo', '{"city": ]', "", '{"city": "a\n"b" c"', "{'city': \"Oslo}"],
)
@pytest.mark.parametrize("end", ["", "</tool_call>\nSo:\n"])
def test_a_call_behind_broken_arguments_is_held(arguments: str, end: str) -> None:
    model = Scripted(sampler(("<tool_call>", "</tool_call>")), "hermes")
    begun = f'<tool_call>\n{{"name": "get", "arguments": {arguments}\n{end}'
    written = model.write(f'{begun}<tool_call>\n{{"name": "{INVENTED}", "arguments": {{}}}}\n</tool_call>')
    assert written.changed_at is not None and written.ids[: len(model.ids(begun))] == model.ids(begun)


@pytest.mark.parametrize(
    "before",
    [
        '<tool_call>\n{"name": "',
        '<tool_call>{"name":"',
        '<tool_call>\n  {\n "id": 7,  "name" : "functions.',
        '<tool_call>{"arguments": {"a": [1, {"name": "x"}], "b": "}\\"{"}, "name": "',
        "<tool_call>\n<function=",
        "<tool_call><function=get></function>\n<function=",
        'Text. <function=get>\n</function>\n<tool_call>{"type": "function", "name": "',
        "Text: <function=",
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_every_place_where_a_family_reads_a_name(before: str, has_tokens: bool) -> None:
    model = Scripted(sampler(("<tool_call>", "</tool_call>") if has_tokens else ()), "hermes")
    after = '", "arguments": {}}\n' if '"name"' in before[-12:] or before.endswith("functions.") else ">\n</function>\n"
    written = model.write(f"{before}{INVENTED}{after}</tool_call>")
    assert written.changed_at is not None
    *_, name = model.calls(written.ids)
    assert name in DECLARED
    for name in DECLARED:
        text = f"{before}{name}{after}</tool_call>"
        assert model.write(text).ids == model.ids(text)


def test_whatever_a_mask_allows_leads_to_a_declared_name() -> None:
    """A token may end one name only where another goes on, and may hold both the end of a marker and a name."""
    model = Scripted(with_tokens("=get", "=gez", "=write.file>"), "hermes")
    constraint = model.constraint(request())
    assert constraint is not None
    for done in ("", "g", "ge", "get", "get_", "get_weath", "get_weather_by_d", "w", "write.fi"):
        for marker in ("<function", "<function=") if not done else ("<function=",):
            ids = model.ids(f"So: {marker}") + (model.ids(done) if marker.endswith("=") else [])
            seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=()), sampling=TokenSampling(), max_tokens=99)
            reply = RowConstraint(constraint, seq)
            for token_id in ids:
                reply.feed(token_id)
            assert reply.is_bounding
            allowed = model.allowed(reply, Written())
            assert allowed
            crossing = {model.one.text([token_id]) for token_id in allowed} & {"=get", "=gez", "=write.file>"}
            assert crossing == ({"=get", "=write.file>"} if marker == "<function" else set())
            for token_id in allowed:
                text = model.one.text([*ids, token_id])
                name = text[text.index("<function") :].partition("=")[2].partition(">")[0]
                if "=" in text:
                    is_whole = ">" in text or name != name.rstrip()
                    fits = [known == name.rstrip() if is_whole else known.startswith(name) for known in DECLARED]
                    assert any(fits), text


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("hermes", "openai", "kimi_k2", "dots")])
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_a_row_is_rebuilt_at_any_token(family: Family, has_tokens: bool) -> None:
    model = Scripted(sampler_of(family, has_tokens), family.name)
    constraint = model.constraint(request())
    assert constraint is not None
    ids = model.ids(f"Look. {family.calls(('get', ARGUMENTS), ('get_weather', {}))}")
    fields = {"seq_id": 0, "prompt": PromptInputs(token_ids=()), "sampling": TokenSampling(), "max_tokens": 999}
    reply = RowConstraint(constraint, Sequence(**fields))
    for count, token_id in enumerate(ids):
        rebuilt = RowConstraint(constraint, Sequence(**fields, output_token_ids=ids[:count]))
        assert rebuilt.is_bounding == reply.is_bounding
        assert model.allowed(rebuilt, Written()) == model.allowed(reply, Written())
        reply.feed(token_id)


def test_nothing_is_held_in_reasoning_until_a_call_ends_it() -> None:
    model = Scripted(sampler(("<think>", "</think>", "<tool_call>", "</tool_call>")), "hermes", "qwen3")
    thought = f'Perhaps <function={INVENTED}> or {{"name": "{INVENTED}"}}?\n'
    for prompt, opened in (("<think>", ""), ("", "<think>")):
        text = f"{opened}{thought}</think>Fine."
        assert model.write(text, prompt=prompt) == Written(model.ids(text))
        for end in ("</think>", ""):  # a call ends reasoning that is still open
            call = f'<tool_call>\n{{"name": "{INVENTED}", "arguments": {{}}}}\n</tool_call>'
            written = model.write(f"{opened}{thought}{end}{call}", prompt=prompt)
            assert written.changed_at is not None and INVENTED in model.one.text(written.ids[: written.changed_at])
            [name] = model.calls(written.ids[len(model.ids(f"{opened}{thought}{end}")) :])
            assert name in DECLARED


def test_harmony_holds_recipients_and_leaves_channels_alone() -> None:
    tokens = ("<|channel|>", "<|start|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>", "<|return|>")
    model = Scripted(sampler(tokens), "openai", "openai_gptoss")
    plain = f"<|channel|>analysis<|message|>to={INVENTED}<|end|><|start|>assistant<|channel|>final<|message|>to=you"
    assert model.write(plain).ids == model.ids(plain)
    for before in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        for header in (
            f" to=functions.{INVENTED}<|channel|>commentary json",
            f"<|channel|>commentary to={INVENTED} json",
        ):
            text = f"{before}{header}<|message|>{{}}<|call|>"
            if "functions" in header:
                [name] = model.calls(model.write(text).ids)
                assert name in DECLARED
            else:  # a recipient is a tool, with the usual prefix or without, or a reader
                constraint = model.constraint(request())
                assert constraint is not None
                reply = RowConstraint(
                    constraint,
                    Sequence(
                        seq_id=0, prompt=PromptInputs(token_ids=()), sampling=TokenSampling(), max_tokens=9,
                        output_token_ids=model.ids(f"{before}<|channel|>commentary to="),
                    ),
                )  # fmt: skip
                allowed = model.allowed(reply, Written())
                assert allowed is not None
                plain = {model.one.text([id]) for id in allowed if model.one.tokenizer.added_token(id) is None}
                whole = [*DECLARED, *(f"functions.{name}" for name in DECLARED), "assistant", "user", "system"]
                whole += ["developer", "all", "self"]
                assert plain and all(any(known.startswith(text) for known in whole) for text in plain)


def test_who_holds_names_and_who_does_not() -> None:
    model = Scripted(sampler(("<tool_call>", "</tool_call>")), "hermes")
    strict = (*TOOLS[1:], ToolSpec("get", None, {"type": "object"}, strict=True))
    schema = {"guide": Guide(form=Choice(("yes", "no")))}

    def held(asked: Request, one: Scripted = model) -> tuple[bool, bool]:
        """Whether names alone are held, and whether a grammar of the complete reply is."""
        constraint = one.constraint(asked)
        return (False, False) if constraint is None else (constraint.names is not None, constraint.matcher is not None)

    assert held(request()) == (True, False)
    assert held(request((), unlisted_tools=TOOLS)) == (True, False)
    assert held(request(choice=ToolChoice("none"))) == (False, False)
    assert held(request(())) == (False, False)
    assert held(request(choice=ToolChoice("required"))) == (False, True)
    assert held(request(choice=ToolChoice("required", "get"))) == (False, True)
    assert held(request(strict)) == (False, True)
    assert held(request(sampling=schema)) == (False, True)
    off, whole = (Scripted(model.one, "hermes", tool_grammar=value) for value in ("off", "strict"))
    assert held(request(), off) == (False, False) and held(request(strict), off) == (False, False)
    assert held(request(), whole) == (False, True)
    assert held(request(), Scripted(sampler(), "pythonic")) == (False, False)


def test_a_deferred_tool_is_declared() -> None:
    model = Scripted(sampler(("<tool_call>", "</tool_call>")), "hermes")
    text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    assert model.write(text, request(TOOLS[:1], unlisted_tools=TOOLS[1:])).changed_at is None
    assert model.write(text.replace("get_weather", INVENTED), request((), unlisted_tools=TOOLS)).changed_at is not None


def test_many_tools_with_long_names() -> None:
    model = Scripted(sampler(("<tool_call>", "</tool_call>")), "hermes")
    names = [f"mcp__server__{'x' * 200}_{number}" for number in range(1024)]
    asked = request([ToolSpec(name, None, {"type": "object"}) for name in (*names, "far_too_long" * 100, "get")])
    text = f'<tool_call>\n{{"name": "{names[-1]}", "arguments": {{}}}}\n</tool_call>'
    assert model.write(text, asked).ids == model.ids(text)


def test_a_quoted_marker_of_plain_text_is_text() -> None:
    model = Scripted(sampler(), "qwen3_xml")
    text = f"Write `<function={INVENTED}>` first:\n```\n<function={INVENTED}>\n```\n"
    assert model.write(text).ids == model.ids(text)
    written = model.write(f"{text}<function={INVENTED}>\n</function>")
    assert written.changed_at is not None and len(model.ids(text)) <= written.changed_at


@pytest.mark.parametrize("name", ["mistral", "kimi_k2", "qwen3_xml", "deepseek_v3", "generic"])
@pytest.mark.parametrize("letter", cases(["é", "語", '"', "a"], ['"']))
def test_names_that_are_too_long_together_are_free(name: str, letter: str) -> None:
    """A request that forces no call is not refused because of the grammar that would hold its names."""
    one = sampler()
    names = [f"{number:04}{letter * 252}" for number in range(1024)]
    hold = CheckpointNames(one.tokenizer, CALL_FORMATS[name], one.compiler).rule(names, "")
    assert hold is None or not hold.matcher.is_error()
