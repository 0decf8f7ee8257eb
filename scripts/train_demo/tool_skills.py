"""Calls of any declared tool: one that is named or follows from the question, two in a turn, or none."""

import random

from . import agent_tools, filler, text_skills
from .chat import Assistant, Call, Conversation, System, ToolResult, Turn, ask
from .errands import errand, first_line, read_step, request, run_step, two_reads, without_calls, write_step
from .tool_cases import Case, cases, named, weather

NO_TOOL = "I have no tool for this."


def single(case: Case) -> list[Turn]:
    made = Call(case.tool.name, case.arguments)
    return [
        ask(case.request),
        Assistant("", f"I call {made.name}.", "tool", (made,)),
        ToolResult(case.result),
        Assistant(f"Result: {first_line(case.result)}", "I have the result.", "tool_result"),
    ]


def double(rng: random.Random, case: Case) -> list[Turn]:
    text, arguments = case.twin
    calls = (Call(case.tool.name, case.arguments), Call(case.tool.name, arguments))
    results = (case.result, weather(rng).result)
    return [
        ask(text),
        Assistant("", f"I call {case.tool.name} twice.", "two_calls", calls),
        *map(ToolResult, results),
        Assistant("\n".join(f"Result: {first_line(r)}" for r in results), "I have the results.", "tool_result"),
    ]


def missing(rng: random.Random) -> list[Turn]:
    """Make an agent's request where nothing is declared."""
    step = rng.choice((read_step, write_step, lambda r: run_step(r, True)))(rng)
    text = weather(rng).request if rng.random() < 0.3 else request(rng, [step.words])
    return [ask(text), Assistant(NO_TOOL, "There is no tool for this.", "no_tool")]


def unavailable_chain(rng: random.Random) -> Conversation:
    """Such requests among plain talk."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns += missing(rng) if rng.random() < 0.8 else text_skills.small_talk(rng)
    return Conversation(tuple(turns))


def tools(rng: random.Random) -> Conversation:
    if rng.random() < 0.08:
        return Conversation(tuple(missing(rng)))
    declared = cases(rng, rng.choice((1, 1, 1, 2, 2, 3, 5)))
    crowd = [agent_tools.bystander(rng, 0) for _ in range(rng.choice((0, 0, 0, 0, 2)))]
    case = rng.choice(declared)
    names = {c.tool.name for c in declared}
    listing = [c.tool for c in declared] + list({t.name: t for t in crowd if t.name not in names}.values())
    rng.shuffle(listing)
    kind = rng.random()
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns += without_calls(rng)
    if kind < 0.14:
        turns += without_calls(rng)
    elif case.twin and kind < 0.55:
        turns += double(rng, case)
    else:
        turns += single(case)
    if kind > 0.85:
        turns += single(rng.choice(declared))
    if rng.random() < 0.35:
        size = rng.choice((0, 0, 200, 600))
        turns.insert(0, System(filler.system_prompt(rng, size)))
    return Conversation(tuple(turns), tuple(listing))


def tool_chain(rng: random.Random) -> Conversation:
    """Several requests, one for each tool: more calls to learn from in fewer tokens."""
    declared = cases(rng, rng.randint(2, 5))
    turns: list[Turn] = []
    for case in declared:
        turns += double(rng, case) if case.twin and rng.random() < 0.5 else single(case)
        if rng.random() < 0.2:
            turns += without_calls(rng)
    listing = [case.tool for case in declared]
    rng.shuffle(listing)
    if rng.random() < 0.3:
        turns.insert(0, System(filler.system_prompt(rng, 0)))
    return Conversation(tuple(turns), tuple(listing))


def pairs(rng: random.Random) -> Conversation:
    """Double requests, a single one among them, behind one or two tools."""
    if rng.random() < 0.35:
        return reading_pairs(rng)
    case = weather(rng)
    declared = [case, *([named(rng)] if rng.random() < 0.3 else [])]
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        turns += double(rng, again(rng, case)) if rng.random() < 0.8 else single(rng.choice(declared))
    return Conversation(tuple(turns), tuple(c.tool for c in declared))


def again(rng: random.Random, case: Case) -> Case:
    """Another request for the same weather tool."""
    other = weather(rng)
    (parameter,) = case.arguments
    (here,), (there,) = other.arguments.values(), other.twin[1].values()
    twin = (other.twin[0], {parameter: there})
    return Case(case.tool, other.request, {parameter: here}, other.result, twin)


def reading_pairs(rng: random.Random) -> Conversation:
    kit = agent_tools.kit(rng, crowd=0, size=0)
    turns = [turn for _ in range(rng.choice((2, 3))) for turn in two_reads(rng, kit)]
    if rng.random() < 0.3:
        turns += errand(rng, kit, 1)
    return Conversation(tuple(turns), kit.tools)
