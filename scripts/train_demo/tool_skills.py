"""Calls of any declared tool: made-up tools with requests for them; one call, two in a turn, or none."""

import json
import random
from dataclasses import dataclass

from . import agent_tools, skills, words
from .agent_tools import READ, RUN, WRITE, declare
from .chat import Assistant, Call, Conversation, System, Tool, ToolResult, Turn, ask
from .errands import PLAIN, errand, first_line, request, two_reads, without_calls


@dataclass(frozen=True, slots=True)
class Case:
    """A tool, a request that needs it, the arguments, a second set for a double request, a result."""

    tool: Tool
    request: str
    arguments: dict[str, object]
    result: str
    twin: tuple[str, dict[str, object]] | None = None


def make_tool(rng: random.Random, name: str, about: str, required: dict[str, str], extra: tuple[str, ...] = ()) -> Tool:
    """Declare parameters as agents do, with the given types."""
    size = rng.choice((0, 0, 0, 0, 0, 60))
    tool = declare(rng, name, tuple(required), about, tuple(e for e in extra if rng.random() < 0.25), size)
    schema = {k: {**v, "type": required.get(k, v["type"])} for k, v in tool.schema.items()}
    return Tool(tool.name, tool.description, schema, tool.required)


def weather(rng: random.Random) -> Case:
    parameter = rng.choice(("city", "city", "location", "location", "place"))
    name = rng.choice(("get_weather", "get_weather", "weather", "Weather", "get_current_weather", "fetch_weather"))
    tool = make_tool(
        rng, name, rng.choice(("Get the weather", "Get the current weather in a given location", "Weather for a city")),
        {parameter: "string"}, ("unit", "units", "days"),
    )  # fmt: skip
    here, there = words.city(rng), words.city(rng)
    forms = (
        "What is the weather in {}?", "What is the weather in {}?", "What's the weather in {}?", "Weather in {}?",
        "How is the weather in {}?", "Get the weather for {}.", "What's the weather like in {}?",
        "what is the weather in {}?", "What is the weather like in {}?", "Tell me the weather in {}.",
    )  # fmt: skip
    sky = rng.choice(("sunny", "rain", "cloudy", "snow", "clear", "windy"))
    warmth = rng.randint(-9, 35)
    result = rng.choice(
        (f"{warmth} C, {sky}", sky, json.dumps({"temp": warmth, "sky": sky}), f"{sky}, {warmth} degrees")
    )
    form = rng.choice(forms)
    return Case(
        tool, form.format(here), {parameter: here}, result, (form.format(f"{here} and {there}"), {parameter: there})
    )


def search(rng: random.Random) -> Case:
    parameter = rng.choice(("query", "query", "q"))
    name = rng.choice(("web_search", "search", "Search", "search_web", "WebSearch"))
    tool = make_tool(rng, name, rng.choice(("Search the web", "Search for text")), {parameter: "string"}, ("limit",))
    text = words.plain_phrase(rng, 1, 4)
    form = rng.choice(("Search for {}", "Search the web for {}", "Look up {}", "Search for {}.", "search for {}"))
    return Case(tool, form.format(text), {parameter: text}, words.phrase(rng, 2, 6))


def addition(rng: random.Random) -> Case:
    a, b = rng.randint(0, 999), rng.randint(0, 99)
    name = rng.choice(("add", "add_numbers", "calculator", "sum"))
    tool = make_tool(rng, name, "Add two numbers", {"a": "integer", "b": "integer"})
    form = rng.choice(
        ("Use the tool to add {} and {}", "Add {} and {}", "Add {} and {} with the tool", "add {} and {}")
    )
    return Case(tool, form.format(a, b), {"a": a, "b": b}, str(a + b))


VERBS = words.listed(
    "get find fetch send create delete update show list check open start stop book order print play call"
)


def verb_noun(rng: random.Random) -> Case:
    """`get_order` for "Get the order 12.": the name is said in words."""
    verb, noun = rng.choice(VERBS), rng.choice(words.NOUNS)
    parameter = rng.choice((noun, "name", "id", "target", "title", "user", "key", "value", words.word(rng)))
    value = rng.choice((words.word(rng), words.name(rng), words.number(rng, 0, 9999)))
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", verb.capitalize() + noun.capitalize(), f"{verb}-{noun}"))
    tool = make_tool(rng, name, f"{verb.capitalize()} a {noun}", {parameter: "string"}, ("limit", "format", "verbose"))
    form = rng.choice(("{v} the {n} {x}", "{v} the {n} {x}.", "{v} {n} {x}", "Please {v} the {n} {x}."))
    text = form.format(v=verb if form[0] == "P" else verb.capitalize(), n=noun, x=value)
    return Case(tool, text, {parameter: value}, words.phrase(rng, 1, 4))


def named(rng: random.Random) -> Case:
    """Any tool, called by its name with its parameters spelled out; some have none."""
    first, second = words.word(rng), words.word(rng)
    name = rng.choice((f"{first}_{second}", f"{first}_{second}", first, first.capitalize() + second.capitalize()))
    pool = ["name", "text", "value", "key", "title", "id", "target", "path", "user", "mode", words.word(rng)]
    labels = rng.sample(list(dict.fromkeys(pool)), rng.choice((0, 1, 1, 1, 2, 2)))
    arguments: dict[str, object] = {}
    types = {}
    for label in labels:
        types[label] = rng.choice(("string", "string", "string", "integer"))
        arguments[label] = rng.randint(0, 999) if types[label] == "integer" else words.word(rng)
    tool = make_tool(rng, name, rule_of(rng), types, ("limit", "format", "verbose", "note"))
    call = rng.choice(("Call {n}", "Use {n}", "Use the {n} tool", "Call the {n} tool", "Call the tool {n}"))
    joint = rng.choice((" ", " ", "=", " = ", ": "))
    listed = rng.choice((" and ", " and ", ", ")).join(f"{k}{joint}{v}" for k, v in arguments.items())
    text = call.format(n=name) + (f" with {listed}" if arguments else "") + rng.choice((".", "", ""))
    return Case(tool, text, arguments, words.phrase(rng, 1, 4))


def rule_of(rng: random.Random) -> str:
    return rng.choice(("A tool", f"{words.word(rng).capitalize()} the {words.word(rng)}", words.rule(rng)))


CASES = {weather: 3.0, search: 1.2, addition: 1.2, verb_noun: 2.0, named: 3.0}


def cases(rng: random.Random, amount: int) -> list[Case]:
    """Cases whose tools have different names; only one of a kind unless the name is said."""
    found: dict[str, Case] = {}
    used = set()
    while len(found) < amount:
        kind = rng.choices(list(CASES), list(CASES.values()))[0]
        if kind in used and kind not in (named, verb_noun):
            continue
        used.add(kind)
        case = kind(rng)
        found.setdefault(case.tool.name, case)
    return list(found.values())


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
    step = PLAIN.step(rng, rng.choice((READ, WRITE, RUN)), bare=True)
    text = weather(rng).request if rng.random() < 0.3 else request(rng, [step.words])
    return [ask(text), Assistant(NO_TOOL, "There is no tool for this.", "no_tool")]


def unavailable_chain(rng: random.Random) -> list[Turn]:
    """Such requests among plain talk."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns += missing(rng) if rng.random() < 0.8 else skills.small_talk(rng)
    return turns


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
        turns.insert(0, System(words.system_prompt(rng, size)))
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
        turns.insert(0, System(words.system_prompt(rng, 0)))
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
    kit = agent_tools.draw_kit(rng, crowd=0, size=0)
    turns = [turn for _ in range(rng.choice((2, 3))) for turn in two_reads(rng, kit)]
    if rng.random() < 0.3:
        turns += errand(rng, kit, 1)
    return Conversation(tuple(turns), kit.tools)
