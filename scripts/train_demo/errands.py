"""Errands for a coding agent: read, run and write, in any order, then say a last word. One tool call a turn.

Later courses draw them behind the whole prompt of an agent, several in a row, with words that the tokenizer must cut,
and with steps that are easily mixed up: commands that echo beside writes by the shell.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import agent_tools, skills, words
from .agent_tools import CONTENT_NAMES, READ, RUN, WRITE, Kit
from .chat import Assistant, Call, Conversation, System, ToolResult, Turn, User, ask

DONE = "Done."
SHELL_WRITE = 'printf "{}" > {}'  # no command in `words` starts so: the first word tells a write from a run
ECHO_WRITE = "echo {} > {}"
READ_FORMS = (
    "read {p}", "read {p}", "read the file {p}", "open {p}", "look at {p}", "show me {p}", "check the file {p}",
    "read `{p}`", "look at the file {p}",
)  # fmt: skip
RUN_FORMS = (
    "run `{c}`", "run `{c}`", "run `{c}`", "run the command `{c}`", "execute `{c}`", "run the shell command `{c}`",
    "run this command: `{c}`",
)  # fmt: skip
RUN_BARE = ("run {c}", "run {c}", "run the command: {c}", "run the command {c}", "execute {c}", "run: {c}")
WRITE_FORMS = (
    "write {t} to {p}", "write {t} to {p}", 'write "{t}" to {p}', "write the text {t} to {p}", "write {t} into {p}",
    "create {p} with the content {t}", "create the file {p} with the text {t}", "save {t} to {p}",
    'create {p} with the content "{t}"', "write {t} to the file {p}", "write `{t}` to {p}", "write '{t}' to {p}",
    "write the file {p} with the content {t}", "write a file {p} with the text {t}", 'write the word "{t}" to {p}',
    "write {p} with the text {t}",
)  # fmt: skip
SAY_FORMS = (
    "say {m}", "say {m}", "reply with {m}", "finish with {m}", "answer {m}", "say: {m}", 'say "{m}"', "reply {m}",
)  # fmt: skip
GLUES = (", then ", ", then ", " and then ", "; then ", ", and then ", ". Then ", "; ", ", ")


@dataclass(frozen=True, slots=True)
class Step:
    """One action: its words in the request and the values of the call."""

    action: str
    words: str
    values: dict[str, str]


Draw = Callable[[random.Random], str]
DrawSteps = Callable[[random.Random, int], list[Step]]


@dataclass(frozen=True, slots=True)
class Content:
    """The paths, command lines and texts that steps are about."""

    path: Draw
    line: Draw
    text: Draw

    def step(self, rng: random.Random, action: str, *, bare: bool = False) -> Step:
        """Draw a step. With `bare`, half of the command lines stand without backticks."""
        if action == RUN:
            line = self.line(rng)
            form = rng.choice(RUN_BARE if bare and rng.random() < 0.5 else RUN_FORMS)
            return Step(RUN, form.format(c=line), {"command": line})
        target = self.path(rng)
        if action == READ:
            return Step(READ, rng.choice(READ_FORMS).format(p=target), {"path": target})
        text = self.text(rng)
        return Step(WRITE, rng.choice(WRITE_FORMS).format(p=target, t=text), {"path": target, "content": text})


def plain_text(rng: random.Random) -> str:
    return words.plain_phrase(rng, 1, rng.choice((1, 2, 4)))


PLAIN = Content(words.path, words.command, plain_text)


def steps(rng: random.Random, amount: int) -> list[Step]:
    """Distinct actions; three of them stand in the order read, run, write most of the time."""
    actions = [READ, RUN, WRITE]
    if amount < 3 or rng.random() < 0.3:
        rng.shuffle(actions)
    return [PLAIN.step(rng, action, bare=amount == 1) for action in actions[:amount]]


def call(kit: Kit, step: Step) -> Call:
    """Return the step as a call of the tool that the kit has for it, arguments in the declared order.

    Without a tool to write, the shell writes.
    """
    if step.action not in kit.by_action:
        command = SHELL_WRITE.format(step.values["content"], step.values["path"])
        step = Step(RUN, step.words, {"command": command})
    tool = kit.by_action[step.action]
    if step.action == WRITE:
        values = {n: step.values["content" if n in CONTENT_NAMES else "path"] for n in tool.required}
    else:
        values = dict.fromkeys(tool.required, *step.values.values())
    return Call(tool.name, values)


def by_echo(conversation: Conversation) -> Conversation:
    """Return the same conversation, in which the shell writes files by `echo`."""
    return replace(conversation, turns=tuple(map(echoing, conversation.turns)))


def echoing(turn: Turn) -> Turn:
    if not isinstance(turn, Assistant):
        return turn
    return replace(turn, calls=tuple(Call(c.name, dict(map(echoed, c.arguments.items()))) for c in turn.calls))


def echoed(argument: tuple[str, object]) -> tuple[str, object]:
    name, value = argument
    written = re.fullmatch(re.escape(SHELL_WRITE).replace(r"\{\}", "(.*)"), str(value))
    return name, ECHO_WRITE.format(*written.groups()) if written else value


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def request(rng: random.Random, pieces: list[str]) -> str:
    """Return the steps as a user types them: one line, a list, or a sentence with first and finally."""
    kind = rng.random()
    if len(pieces) > 1 and kind < 0.15:
        return "\n".join(f"{i}. {sentence(p)}" for i, p in enumerate(pieces, 1))
    if len(pieces) > 1 and kind < 0.25:
        return ", then ".join([f"First {pieces[0]}", *pieces[1:]]) + "."
    glue = rng.choice(GLUES)
    text = pieces[0]
    for piece in pieces[1:]:
        text += glue + (sentence(piece) if glue == ". " else piece)
    if len(pieces) > 2 and glue == ", ":
        text = ", ".join(pieces[:-1]) + f" and {pieces[-1]}"
    text = rng.choice((sentence(text), sentence(text), sentence(text), text, f"Please {text}"))
    text += rng.choice((".", "", ""))
    return f'"{text}"' if rng.random() < 0.08 else text


def result(rng: random.Random, action: str) -> str:
    """Return the result of the tool. Its first line is short."""
    if action == WRITE:
        target = words.path(rng)
        return rng.choice(("ok", "Wrote file successfully.", f"File created successfully at: {target}", "File written"))
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(("(no output)", f"Error: {words.plain_phrase(rng)}", "ok", words.number(rng)))
    lines = [words.phrase(rng, 1, 5) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    if action == READ and kind < 0.3:
        return "\n".join(f"{i}\t{line}" for i, line in enumerate(lines, 1))
    return "\n".join(lines)


def first_line(text: str) -> str:
    return text.split("\n", 1)[0].rstrip()


def calling(made: Call) -> Assistant:
    return Assistant("", f"I call {made.name}.", "errand", (made,))


def errand(rng: random.Random, kit: Kit, amount: int, draw: DrawSteps = steps) -> list[Turn]:
    """`amount` steps. A single step ends with its result, several end with the wished word or with Done."""
    todo = draw(rng, amount)
    pieces = [step.words for step in todo]
    last = DONE
    if rng.random() < (0.5 if amount > 1 else 0.15):
        last = words.marker(rng) if rng.random() < 0.6 else "done"
        pieces.append(rng.choice(SAY_FORMS).format(m=last))
    turns: list[Turn] = [ask(request(rng, pieces))]
    given = ""
    for step in todo:
        given = result(rng, step.action)
        turns += [calling(call(kit, step)), ToolResult(given)]
    if len(pieces) == 1:
        return [*turns, Assistant(f"Result: {first_line(given)}", "I have the result.", "tool_result")]
    return [*turns, Assistant(last, "All steps are done.", "errand_end")]


def two_reads(rng: random.Random, kit: Kit) -> list[Turn]:
    """Two files in one turn."""
    first, second = words.path(rng), words.path(rng)
    form = rng.choice(("read {} and {}", "read the files {} and {}", "open {} and {}", "show me {} and {}"))
    tool = kit.by_action[READ]
    calls = tuple(Call(tool.name, {tool.required[0]: p}) for p in (first, second))
    results = [result(rng, READ) for _ in calls]
    reply = "\n".join(f"Result: {first_line(r)}" for r in results)
    return [
        ask(request(rng, [form.format(first, second)])),
        Assistant("", f"I call {tool.name} twice.", "two_calls", calls),
        *map(ToolResult, results),
        Assistant(reply, "I have the results.", "tool_result"),
    ]


def with_surroundings(rng: random.Random, turns: list[Turn], size: int) -> list[Turn]:
    """Return the turns behind a system prompt, a reminder or a later system message, as clients send them."""
    first = turns[0]
    if rng.random() < 0.2 and isinstance(first, User) and isinstance(first.parts[0], str):
        turns = [ask(words.reminder(rng, rng.randint(40, 300)) + first.parts[0]), *turns[1:]]
    if rng.random() < 0.2:
        turns = [turns[0], System(words.blocks(rng, rng.randint(40, max(80, size)))), *turns[1:]]
    if size or rng.random() < 0.3:
        turns = [System(words.system_prompt(rng, size)), *turns]
    return turns


def without_calls(rng: random.Random) -> list[Turn]:
    """Talk that needs no tool, scored as such."""
    turns = skills.small_talk(rng)
    return [Assistant(t.text, t.thought, "no_call") if isinstance(t, Assistant) else t for t in turns]


def act(rng: random.Random, kit: Kit, long: bool) -> list[Turn]:
    """Make one request to an agent: mostly errands, at times talk that needs no tool."""
    kind = rng.random()
    if kind < 0.78 or long:
        return errand(rng, kit, rng.choice((3, 3, 3, 2) if long else (1, 1, 1, 2, 3, 3)))
    if kind < 0.86:
        return two_reads(rng, kit)
    return without_calls(rng)


SIZES = ((0, 0, 0), (0, 3, 0), (300, 2, 40), (800, 3, 60), (1200, 6, 50), (2000, 7, 30), (500, 0, 500))


def agent(rng: random.Random, size: tuple[int, int, int] | None = None, *, long: bool = False) -> Conversation:
    """`size` is the characters of the system prompt, the number of other tools, the characters a tool."""
    prompt, crowd, tool_size = rng.choices(SIZES, (7, 5, 3, 2, 1, 1, 1))[0] if size is None else size
    kit = agent_tools.draw_kit(rng, crowd=rng.randint(0, crowd) if size is None else crowd, size=tool_size)
    turns = act(rng, kit, long)
    if not long and rng.random() < 0.3:
        turns += act(rng, kit, long)
    return Conversation(tuple(with_surroundings(rng, turns, prompt)), kit.tools)


def agent_chain(rng: random.Random) -> Conversation:
    """Several requests to one agent: more calls to learn from in fewer tokens."""
    kit = agent_tools.draw_kit(rng, crowd=rng.choice((0, 0, 1, 3)), size=0)
    turns: list[Turn] = []
    for _ in range(rng.randint(2, 5)):
        turns += act(rng, kit, long=rng.random() < 0.4)
    return Conversation(tuple(with_surroundings(rng, turns, 0)), kit.tools)


def agent_far(rng: random.Random) -> Conversation:
    """Return a whole errand behind a prompt of two to four thousand tokens."""
    return agent(rng, (rng.randint(1_500, 4_500), rng.randint(3, 8), rng.randint(150, 400)), long=True)


PATH_OPENINGS = ("", "", "./", "/", "src/", "/tmp/", "docs/")


def odd_path(rng: random.Random) -> str:
    file = f"{words.odd(rng)}.{rng.choice(words.EXTENSIONS)}"
    folder = f"{words.odd(rng)}/" if rng.random() < 0.3 else ""
    return rng.choice(PATH_OPENINGS) + folder + file


def odd_phrase(rng: random.Random) -> str:
    """Return a text of one to four words, most of them odd, as long as the texts of `PLAIN`."""
    length = rng.randint(1, rng.choice((1, 2, 4)))
    return " ".join(words.odd(rng) if rng.random() < 0.6 else words.word(rng) for _ in range(length))


def odd_command(rng: random.Random) -> str:
    target, word = odd_path(rng), words.odd(rng)
    forms = (
        "cat {t}", "python {t}", "wc -l {t}", "grep {w} {t}", "make {w}", "mkdir {w}", "echo {w} > {t}", "{w} --{w}",
    )  # fmt: skip
    return rng.choice(forms).format(t=target, w=word)


ODD = Content(odd_path, odd_command, odd_phrase)


def odd_steps(rng: random.Random, amount: int) -> list[Step]:
    """Different actions, one of which writes, because the end of a written text is the hardest to learn."""
    actions = [WRITE, *rng.sample((READ, RUN), amount - 1)]
    rng.shuffle(actions)
    return [ODD.step(rng, action) for action in actions]


def series_with_odd(rng: random.Random, kit: Kit, amount: int) -> list[Turn]:
    """`amount` errands one after the other."""
    turns: list[Turn] = []
    for _ in range(amount):
        turns += errand(rng, kit, rng.choice((3, 3, 2, 1)), rng.choice((steps, odd_steps)))
    return turns


def jumble(rng: random.Random, turns: list[Turn], size: int) -> str:
    """About `size` characters of the user's words in short pieces, to distract the copying."""
    said = " ".join(str(part) for turn in turns if isinstance(turn, User) for part in turn.parts).split()
    pieces: list[str] = []
    while sum(map(len, pieces)) < size:
        start = rng.randrange(len(said))
        pieces.append(" ".join(said[start : start + rng.randint(1, 3)]))
    return " ".join(pieces)


def agent_series(rng: random.Random) -> Conversation:
    """Three to six errands behind a prompt of three to five thousand tokens."""
    kit = agent_tools.draw_kit(rng, crowd=rng.randint(4, 9), size=rng.randint(150, 400))
    turns = with_surroundings(rng, series_with_odd(rng, kit, rng.randint(3, 6)), rng.randint(1_500, 5_000))
    return Conversation(tuple(turns), kit.tools)


def agent_odd(rng: random.Random) -> Conversation:
    """Two to five errands behind next to nothing, or behind their own words."""
    kit = agent_tools.draw_kit(rng, crowd=rng.choice((0, 0, 1, 3)), size=0)
    turns = series_with_odd(rng, kit, rng.randint(2, 5))
    if rng.random() < 0.6:
        turns.insert(0, System(jumble(rng, turns, rng.choice((300, 800, 1_600)))))
    return Conversation(tuple(turns), kit.tools)


def odd_sayings(rng: random.Random) -> list[Turn]:
    return [turn for _ in range(rng.randint(2, 5)) for turn in skills.said(rng, odd_phrase(rng))]


MAX_WORDS = 5
# Characters of the system prompt, other tools, characters a tool: many tools told briefly, or few at length.
LONG_SHAPES = (((1_500, 4_500), (4, 9), (150, 400)), ((100, 1_500), (0, 2), (500, 1_500)))


def mixed_path(rng: random.Random) -> str:
    return rng.choice((words.path, words.path, odd_path))(rng)


def mixed_phrase(rng: random.Random, length: int) -> str:
    text = " ".join(rng.choice((words.word, words.word, words.odd))(rng) for _ in range(length))
    return text.capitalize() if rng.random() < 0.2 else text


def shell_line(rng: random.Random) -> str:
    """Return a command, mostly an `echo`."""
    kind, text = rng.random(), mixed_phrase(rng, rng.randint(1, 3))
    if kind < 0.4:
        return f"echo {text}"
    if kind < 0.6:
        return f"echo {text} > {mixed_path(rng)}"
    return rng.choice((words.command, odd_command))(rng)


def mixed_text(rng: random.Random) -> str:
    return mixed_phrase(rng, rng.randint(1, MAX_WORDS))


SHELL = Content(mixed_path, shell_line, mixed_text)


def shell_steps(rng: random.Random, amount: int) -> list[Step]:
    """Distinct actions in any order, writing among them."""
    actions = [READ, RUN, WRITE]
    if amount < 3 or rng.random() < 0.5:
        others = rng.sample((RUN, READ), amount - 1)
        actions = rng.sample((WRITE, *others), amount)
    return [SHELL.step(rng, action) for action in actions]


def series(rng: random.Random, kit: Kit, amount: int) -> list[Turn]:
    """`amount` errands one after the other."""
    turns: list[Turn] = []
    for _ in range(amount):
        draw = rng.choice((shell_steps, shell_steps, steps, odd_steps))
        turns += errand(rng, kit, rng.choice((3, 3, 3, 2)), draw)
    return turns


def agent_long(rng: random.Random) -> Conversation:
    """Three to nine errands behind a prompt of two to five thousand tokens; nearly half of the agents cannot write."""
    prompt, crowd, size = (rng.randint(*ends) for ends in rng.choice(LONG_SHAPES))
    kit = agent_tools.draw_kit(rng, crowd=crowd, size=size, without_write=0.45)
    turns = with_surroundings(rng, series(rng, kit, rng.randint(3, 9)), prompt)
    return Conversation(tuple(turns), kit.tools)


def agent_writes(rng: random.Random) -> Conversation:
    """As many short errands behind such a prompt, most of them to write; at times it holds their words as well."""
    prompt, crowd, size = (rng.randint(*ends) for ends in rng.choice(LONG_SHAPES))
    kit = agent_tools.draw_kit(rng, crowd=crowd, size=size, without_write=0.3)
    asked: list[Turn] = []
    for _ in range(rng.randint(6, 14)):
        asked += errand(rng, kit, rng.choice((1, 1, 2, 3)), shell_steps)
    turns = with_surroundings(rng, asked, prompt)
    if isinstance(turns[0], System) and rng.random() < 0.4:
        turns[0] = System(f"{turns[0].text}\n\n{jumble(rng, asked, 1_500)}")
    return Conversation(tuple(turns), kit.tools)


def agent_shell(rng: random.Random) -> Conversation:
    """Two to six errands behind next to nothing, or behind their own words; most of the agents cannot write."""
    kit = agent_tools.draw_kit(rng, crowd=rng.choice((0, 0, 1, 3)), size=0, without_write=0.7)
    turns = series(rng, kit, rng.randint(2, 6))
    if rng.random() < 0.6:
        turns.insert(0, System(jumble(rng, turns, rng.choice((300, 800, 1_600, 3_000)))))
    return Conversation(tuple(turns), kit.tools)
