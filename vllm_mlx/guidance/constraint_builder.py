"""Builds the constraint on a reply from the request: its schemas, tools and reasoning budget. Thread-safe."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from ..core.config import EngineConfig
from ..core.errors import GrammarLimit, InvalidParameter, Unsupported, setting
from ..core.messages import ToolSpec
from ..core.request import Grammar, Request
from ..core.sequence import Constraint, NameHold, PromptInputs
from ..formats import Calls, SchemaBudget
from ..formats.family import NO_HEADER, Header
from ..formats.tokenizer import Tokenizer
from ..util.fence import Fence
from ..util.lru import LRU
from .grammar_compiler import MAX_BYTES, GrammarCompiler
from .grammars import CallsWriter, CarriedNames, GuidedTool, LarkWriter, guide_grammar
from .names import CheckpointNames
from .reasoning import CheckpointReasoning

_NO_MARKERS = (
    "thinking_token_budget is set but reasoning_config is not configured. Please set "
    f"{setting('reasoning_parser')} and/or {setting('reasoning_config')} to use thinking_token_budget."
)


_TRIALS_S = 20  # time to find the tools of a grammar that is refused
_FOLLOWED_BYTES = 8 << 20  # texts of refused grammars
_BLANK_LINES = re.compile(r"\n\s*\n")


class ConstraintBuilder:
    """`reasoning` and `tools` are the checkpoint's formats, if it has them. `vocab_size` is the width of the logits.

    `max_grammars_bytes` limits the compiled grammars that are kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_grammars_bytes: int = MAX_BYTES,
        reasoning: CheckpointReasoning | None = None,
        tools: Calls | None = None,
    ):
        self._tokenizer = tokenizer
        self._tools = tools
        self._tool_grammar = config.tool_grammar
        self._default_budget = config.default_thinking_token_budget
        self._grammars = GrammarCompiler(tokenizer, vocab_size, max_grammars_bytes)
        self._reasoning = reasoning
        holds_names = tools is not None and config.tool_grammar == "names"
        # By the tenant and the grammar that was refused
        self._followed: LRU[tuple[str, str], tuple[GuidedTool, ...]] = LRU(_FOLLOWED_BYTES)
        self._names = CheckpointNames(tokenizer, tools, self._grammars) if tools is not None and holds_names else None

    def constraint(
        self, request: Request, prompt: PromptInputs, schemas: SchemaBudget | None = None
    ) -> Constraint | None:
        """Return the constraint on the reply, or None if it is free. Raises RequestError if it cannot be built.

        `schemas`: the budget that is left for the request's schemas. Without it, the budget is complete.
        """
        guide, budget = request.sampling.guide, self._budget(request)
        grammar, param, matcher = self._guided(request, SchemaBudget() if schemas is None else schemas)
        names = self._name_rule(request) if grammar is None else None
        if grammar is None and budget is None and names is None:
            return None
        in_reasoning = guide is not None and guide.in_reasoning
        if in_reasoning and request.sampling.thinking_token_budget not in (None, -1):
            raise InvalidParameter(
                "`thinking_token_budget` cannot be combined with `enable_in_reasoning`.", param="thinking_token_budget"
            )
        has_tools, rule = bool(_declared(request)), None
        if self._reasoning is not None and not in_reasoning:
            rule = self._reasoning.rule(
                prompt.token_ids,
                budget=budget,
                may_think=request.thinking != "off",
                tools=self._tools if has_tools else None,
                bounds_reply=matcher is not None,
            )
        return Constraint(
            matcher=matcher,
            param=param,
            mask_words=self._grammars.mask_words,
            reasoning=rule,
            barred=self._barred(matcher) if has_tools and rule is not None else (),
            names=names,
            refuse=None if grammar is None else partial(self._grammars.refuse, grammar, request.tenant),
        )

    def _guided(self, request: Request, budget: SchemaBudget) -> tuple[str | None, str, LLMatcher | None]:
        """Return the grammar of the complete reply, the request field that asks for it, and its matcher.

        If a tool is not strict, the parts of its schema that cannot be held are left out: it makes no request fail.
        """
        try:
            tools = self._guided_tools(request, budget)
            mark = budget.num_visits
            grammar, param = self._grammar(request, tools, budget)
        except RecursionError as error:
            guide = request.sampling.guide
            param = "tools" if guide is None else guide.param
            raise InvalidParameter(f"`{param}` is nested too deeply.", param=param) from error
        if grammar is None:
            return None, param, None
        key = request.tenant, grammar
        followed = self._followed.get(key)
        if followed is None:
            try:
                return grammar, param, self._grammars.compile(grammar, param, request.tenant)
            except (InvalidParameter, GrammarLimit):
                followed = tuple(self._loosened(tools, request.tenant, time.monotonic() + _TRIALS_S))
                if followed == tuple(tools):
                    followed = tuple(map(GuidedTool.freed, tools))
                if followed == tuple(tools):
                    raise
            self._followed.put(key, followed, len(grammar))
        budget.num_visits = mark
        grammar, param = self._grammar(request, followed, budget)
        assert grammar is not None, "as many tools are guided as before"
        return grammar, param, self._grammars.compile(grammar, param, request.tenant)

    def _loosened(self, tools: Sequence[GuidedTool], tenant: str, end_s: float) -> list[GuidedTool]:
        """Return the tools, of which less is held where a grammar of their calls is refused, found by halving.

        After `end_s`, nothing is held of the tools that are left.
        """
        if time.monotonic() > end_s:
            return [tool.freed() for tool in tools]
        if all(tool.is_fixed for tool in tools) or self._is_followed(tools, tenant):
            return [*tools]
        if len(tools) == 1:
            return self._loosened([tools[0].looser(SchemaBudget())], tenant, end_s)
        half = len(tools) // 2
        return [tool for part in (tools[:half], tools[half:]) for tool in self._loosened(part, tenant, end_s)]

    def _is_followed(self, tools: Sequence[GuidedTool], tenant: str) -> bool:
        """Return whether calls to these tools can be held. Only tools that are not strict can be looser."""
        writer = LarkWriter(self._tokenizer.added)
        try:
            self._grammars.compile(self._calls(writer).required(tools, NO_HEADER, 1), "tools", tenant)
        except (InvalidParameter, GrammarLimit):
            return False
        return True

    def _grammar(self, request: Request, tools: Sequence[GuidedTool], budget: SchemaBudget) -> tuple[str | None, str]:
        guide = request.sampling.guide
        most = 1 if request.tool_choice.name is not None else request.max_tool_calls or None
        writer = LarkWriter(self._tokenizer.added, budget, "tools" if guide is None else guide.param)
        if request.tool_choice.mode == "required":
            if guide is not None:
                raise InvalidParameter(
                    f"A `tool_choice` that forces a call cannot be combined with `{guide.param}`.", param=guide.param
                )
            return self._calls(writer).required(tools, self._header(request), most), "tools"
        if guide is not None:
            if isinstance(guide.form, Grammar):
                guide = replace(guide, form=Grammar(_in_lark(guide.form.text, guide.param)))
            instead = self._calls(writer).calls(tools, most) if tools else ""
            return guide_grammar(guide, writer, self._header(request), calls=instead), guide.param
        if any(tool.is_strict for tool in tools):
            return self._calls(writer).in_text(tools, self._header(request), most), "tools"
        return None, ""

    def _guided_tools(self, request: Request, budget: SchemaBudget) -> list[GuidedTool]:
        """Return the tools that the reply may call, or [] if calls are not guided."""
        choice = request.tool_choice
        is_forced = choice.mode == "required"
        if is_forced and (self._tools is None or self._tool_grammar == "off"):
            parser, grammar = setting("tool_call_parser"), setting("tool_grammar")
            lacks = f"a {parser}" if self._tools is None else f"{grammar} names or strict"
            raise Unsupported(f"A `tool_choice` that forces a call needs {lacks} on this server.", param="tool_choice")
        if self._tools is None or self._tool_grammar == "off" or choice.mode == "none" or request.messages is None:
            return []
        tools = [tool for tool in _declared(request) if choice.allows(tool.name)]
        if is_forced and not tools:
            raise InvalidParameter("`tool_choice` names none of the `tools`.", param="tool_choice")
        carried = CarriedNames((tool.name for tool in _declared(request)), self._tools, self._tokenizer.added)
        is_strict = is_forced or self._tool_grammar == "strict"
        if is_forced:
            carried.check(tools)
        elif is_strict or request.sampling.guide is not None or any(tool.strict for tool in tools):
            tools = [tool for tool in tools if tool.name in carried]  # a grammar writes their calls
        return [
            GuidedTool.of(
                tool,
                tool.param,
                is_strict=is_strict or tool.strict,
                held="all" if tool.strict else "known",
                budget=budget,
            )
            for tool in tools
        ]

    def _name_rule(self, request: Request) -> NameHold | None:
        """Return the rule for the names of calls in a reply without a grammar."""
        if self._names is None or request.tool_choice.mode != "auto" or request.messages is None:
            return None
        names = [tool.name for tool in _declared(request) if request.tool_choice.allows(tool.name)]
        return self._names.rule(names, request.tenant) if names else None

    def _calls(self, writer: LarkWriter) -> CallsWriter:
        assert self._tools is not None, "tools were found"
        return CallsWriter(self._tools, writer)

    def _header(self, request: Request) -> Header:
        guide = request.sampling.guide
        if self._reasoning is None or request.messages is None or (guide is not None and guide.in_reasoning):
            return NO_HEADER
        return self._reasoning.tags.header

    def _barred(self, matcher: Any) -> tuple[int, ...]:
        """Return the tags of calls, which end reasoning, that the grammar does not accept as its first token."""
        if matcher is None or self._tools is None:
            return ()
        call_ids = (self._tokenizer.token_id(tag) for tag in self._tools.tags)
        start = matcher.deep_copy()
        return tuple(call_id for call_id in call_ids if call_id is not None and not start.validate_tokens([call_id]))

    def _budget(self, request: Request) -> int | None:
        asked = request.sampling.thinking_token_budget
        if asked is not None and asked >= 0 and self._reasoning is None:
            raise InvalidParameter(_NO_MARKERS, param="thinking_token_budget")
        if self._reasoning is None or asked == -1:
            return None
        if asked is None:
            asked = request.thinking_limit
        return self._default_budget if asked is None else asked


def _declared(request: Request) -> tuple[ToolSpec, ...]:
    return (*request.tools, *request.unlisted_tools)


def _in_lark(text: str, param: str) -> str:
    """Translate GBNF, recognised by its `::=`, to Lark notation."""
    if "::=" not in text:
        return text
    with Fence("the request, which is refused because the converter raises bare Exceptions", is_logged=False) as fence:
        return str(any_to_lark(_BLANK_LINES.sub("\n", text)))  # the converter takes quadratic time for blank lines
    raise InvalidParameter(f"`{param}` is not a GBNF grammar: {fence.error}", param=param) from fence.error
