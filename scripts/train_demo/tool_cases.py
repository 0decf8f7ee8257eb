"""Made-up tools, each with a request that needs it and the call that answers it."""

import json
import random
from dataclasses import dataclass

from . import filler, words
from .agent_tools import declare
from .chat import Tool


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
    return rng.choice(("A tool", f"{words.word(rng).capitalize()} the {words.word(rng)}", filler.rule(rng)))


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
