"""Words, names, paths, commands and prose to fill conversations with. Every draw takes the generator it draws from."""

import random


def listed(text: str) -> list[str]:
    return text.split()


NAMES = listed("""
Ada Alan Alice Anna Ben Bob Carol Clara Dan David Emma Eva Finn Frank Gina Grace Henry Hugo Iris Ivan Jack
John Julia Kate Kevin Laura Liam Linus Maria Max Mike Nina Nora Oscar Paul Quinn Rosa Sam Sara Tim Tina Tom
Uma Victor Wendy Xavier Yara Zoe
""")
CITIES = listed("""
Paris London Berlin Madrid Rome Tokyo Osaka Seoul Beijing Delhi Cairo Lagos Nairobi Sydney Boston Chicago
Denver Austin Seattle Toronto Lima Oslo Vienna Prague Dublin Lisbon Athens Zurich Geneva Milan Munich Hamburg
Kyoto Mumbai Dubai Moscow Warsaw Helsinki Stockholm Brussels France Germany Spain Italy Japan
""")
COMMON = listed("""
the a an is are was be been in on at to for of and or not with from by as it its this that these those you
your we our they their he she his her I me my do does did done can could should will would must may if then
else when while before after until only also always never just more most less other another each every all any
some no one two three first second third last next new old same own than so but how what which who why where
there here out up down over under again once too very
""")
NOUNS = listed("""
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face level office door health person art war history party result change morning
reason research girl guy moment air teacher force education apple banana orange tiger lion eagle river
mountain ocean forest garden window table chair lamp clock music dance silver golden cloud rain snow wind
storm sun moon star planet rocket robot engine wheel bridge tower castle kitchen bread butter cheese coffee
sugar pepper salt hello please thanks animal dog cat horse bird fish tree flower leaf stone paper pen pencil
phone email letter box bag key lock road street train plane ship boat summer winter spring color shape picture
image letter number price order ticket user customer product item invoice event meeting note task project
""")
WORK = listed("""
agent tool tools code file files folder directory path command commands shell script branch commit repository
test tests build error errors output input text line lines content function class method variable value key
type string object list array default option options argument parameter parameters result results search
pattern match replace edit change changes create delete update read write run execute open close start stop
install package server client request response session prompt model message messages context window limit
timeout optional required absolute relative current working environment platform version date today
information instructions important note notes reminder rules style format example examples use using used user
users help task tasks plan step steps process background long short maximum minimum characters bytes reads
writes runs returns given provided call calls make sure avoid prefer include check explain answer answers
concise direct brief system assistant software engineering security safe permission ask asked
""")
OTHERS = listed("""
green blue red yellow purple white black bright dark quick slow happy little brave calm cold warm fresh early
late good great small large open close walk jump sing build look find think know take come give tell feel
leave put mean keep let begin seem show hear play move live believe bring happen sit stand lose pay meet learn
lead understand watch follow speak allow add spend grow win offer remember love consider appear buy wait serve
die send expect stay fall cut reach kill remain good bad high different important big
""")
WORDS = list(dict.fromkeys(NOUNS + WORK + OTHERS))
SYLLABLES = listed("""
ba be bi bo bu da de di do du fa fe fi ga go gu ka ke ki ko la le li lo lu ma me mi mo mu na ne ni no nu pa pe
pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo za ze zo zu xan qul tor mix zen pel dra vor lim
kal ing tion er est ment ly ward sh th ch st
""")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EXTENSIONS = listed("txt txt txt md md py py json csv log yaml toml sh rs go js ts html cfg")
FOLDERS = listed("tmp home usr etc var src data docs app lib test tests config notes build project user work repo")
STEMS = listed("notes readme README main app test data config hello out output index report todo list setup utils")


def coined(rng: random.Random) -> str:
    """Return an invented word of syllables, or now and then of single letters."""
    if rng.random() < 0.3:
        return "".join(rng.choices(LETTERS, k=rng.randint(2, 6)))
    return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))


def word(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(WORDS)
    return coined(rng)


def phrase(rng: random.Random, low: int = 1, high: int = 6) -> str:
    """Words with single spaces, at times capitalised or ended by a mark."""
    text = " ".join(word(rng) for _ in range(rng.randint(low, high)))
    if rng.random() < 0.3:
        text = text.capitalize()
    if rng.random() < 0.15:
        text += rng.choice("!?.")
    return text


def sentence(rng: random.Random) -> str:
    """Words as English mixes them, small ones among the others, perhaps with marks."""
    pools = (COMMON, COMMON, WORDS, WORDS, NAMES)
    picked = [coined(rng) if rng.random() < 0.06 else rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.15:
        picked[0] += ","
    text = " ".join(picked)
    return (text[0].upper() + text[1:] if rng.random() < 0.3 else text) + rng.choice(("", "", "", "", "!", ".", "?"))


def plain_phrase(rng: random.Random, low: int = 1, high: int = 4) -> str:
    """Words only: no mark that could be taken for the end of a sentence."""
    text = " ".join(word(rng) for _ in range(rng.randint(low, high)))
    return text.capitalize() if rng.random() < 0.2 else text


def marker(rng: random.Random) -> str:
    """Return the word that an agent is to say at the end: DONE, ALL_DONE, finished."""
    first = rng.choice(("DONE", "done", "finished", "OK", "Done", "ready", word(rng), word(rng).upper()))
    return first if rng.random() < 0.6 else f"{word(rng).upper()}_{rng.choice(('DONE', 'OK', 'END'))}"


def name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else coined(rng).capitalize()


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else coined(rng).capitalize()


def odd(rng: random.Random) -> str:
    """Return a word that the tokenizer must cut: a known one in capitals, or coined ones, perhaps with a number."""
    if rng.random() < 0.35:
        known = rng.choice(WORDS)
        return known.capitalize() if rng.random() < 0.6 else known.upper()
    text = "".join(coined(rng) for _ in range(rng.choice((1, 1, 2))))
    if rng.random() < 0.2:
        text = text.capitalize()
    return text + number(rng, 0, 9999) if rng.random() < 0.15 else text


def number(rng: random.Random, low: int = 0, high: int = 99) -> str:
    return str(rng.randint(low, high))


def stem(rng: random.Random) -> str:
    base = rng.choice(STEMS) if rng.random() < 0.4 else word(rng)
    tail = rng.random()
    if tail < 0.15:
        return base + number(rng, 1, 99)
    if tail < 0.3:
        return base + rng.choice("_-") + word(rng)
    return base


def path(rng: random.Random) -> str:
    """`notes.txt`, `src/app.py`, `/home/user/work/out.txt`."""
    file = f"{stem(rng)}.{rng.choice(EXTENSIONS)}"
    depth = rng.choice((0, 0, 0, 1, 1, 2, 3))
    folders = [rng.choice(FOLDERS) if rng.random() < 0.6 else word(rng) for _ in range(depth)]
    lead = rng.choice(("", "", "./", "/")) if depth == 0 else rng.choice(("/", "/", "", "./"))
    return lead + "/".join([*folders, file])


def command(rng: random.Random) -> str:
    """Return a shell line without backticks."""
    target = path(rng)
    return rng.choice(
        (
            "ls", "ls -la", "pwd", "date", "whoami", "git status", "git log --oneline", "uname -a", "df -h",
            f"ls {rng.choice(FOLDERS)}", f"cat {target}", f"wc -l {target}", f"python {target}", f"head -n 5 {target}",
            f"echo {plain_phrase(rng, 1, 3)}", f"echo {plain_phrase(rng, 1, 2)} > {target}", f"make {word(rng)}",
            f"grep {word(rng)} {target}", f"mkdir {word(rng)}", f"npm run {word(rng)}", f"{word(rng)} --{word(rng)}",
            f"python -m {word(rng)} && echo {word(rng)}",
        )
    )  # fmt: skip


OPENINGS = (
    "You are an agent that helps users with software engineering tasks.",
    "You are a coding agent. Use the instructions below and the tools available to you to help the user.",
    "You are an interactive command line tool that helps users with their work.",
    "You are a helpful assistant.",
    "You are Tiny, a small model inside a coding agent.",
)
RULES = (
    "IMPORTANT: {p}.",
    "NEVER {p} unless the user asks for it.",
    "ALWAYS prefer {w} over {w2}.",
    "You should be concise, direct, and {w}.",
    "When the user asks about {w}, {p}.",
    "If you {w} the {w2}, {p}.",
    "Use the {w} tool to {w2} files. Do not use it to {p}.",
    "Do not {w} the {w2} before you {p}.",
    "The {w} of {p} is {w2}.",
    "Run the tests with `{w} {w2}` if you can.",
    "Read files before you edit them.",
    "Only write files when asked: {p}.",
    "Say what you did in {w} lines.",
    "This {w} must be {p}, not {w2}.",
    "Keep in mind that {p} (e.g. \"{w}\", `{w2}`).",
    "Make sure that the {w} is {w2}, then {p}.",
)  # fmt: skip
HEADINGS = ("Tone and style", "Doing tasks", "Tool use", "Code style", "Environment", "Rules", "Notes", "Usage")


def prose(rng: random.Random, high: int = 8) -> str:
    """Return a few words as agent prompts mix them: many small ones, some of the trade, some unknown."""
    pools = (COMMON, COMMON, WORK, WORDS)
    picked = [
        coined(rng) if rng.random() < 0.12 else rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, high))
    ]
    return " ".join(picked)


def rule(rng: random.Random) -> str:
    return rng.choice(RULES).format(p=prose(rng), w=word(rng), w2=word(rng))


def paragraph(rng: random.Random) -> str:
    return " ".join(rule(rng) for _ in range(rng.randint(1, 4)))


def bullets(rng: random.Random) -> str:
    mark = rng.choice(("- ", "* ", " - "))
    return "\n".join(mark + rule(rng) for _ in range(rng.randint(2, 5)))


def heading(rng: random.Random) -> str:
    return "#" * rng.randint(1, 3) + " " + rng.choice(HEADINGS)


def environment(rng: random.Random) -> str:
    lines = [
        f"Working directory: /{rng.choice(FOLDERS)}/{word(rng)}",
        f"Is directory a git repo: {rng.choice(('yes', 'no', 'Yes', 'No'))}",
        f"Platform: {rng.choice(('linux', 'darwin'))}",
        f"Today's date: {rng.choice(('Fri Nov', 'Mon Jan', 'Tue May'))} {number(rng, 1, 28)} 2026",
    ]
    return rng.choice(("<env>\n{}\n</env>", "{}", "Here is the environment:\n{}")).format("\n".join(lines))


def example(rng: random.Random) -> str:
    return f"<example>\nuser: {prose(rng)}\nassistant: {prose(rng)}\n</example>"


def blocks(rng: random.Random, size: int) -> str:
    """About `size` characters of prompt text."""
    parts, length = [], 0
    while length < size:
        kind = rng.choice((paragraph, paragraph, bullets, bullets, heading, example, environment))
        parts.append(kind(rng))
        length += len(parts[-1])
    return rng.choice(("\n\n", "\n")).join(parts)


def system_prompt(rng: random.Random, size: int) -> str:
    """Return an opening, then about `size` characters more."""
    text = rng.choice(OPENINGS)
    return text if size <= 0 else text + "\n\n" + blocks(rng, size)


def reminder(rng: random.Random, size: int) -> str:
    """Return the texts that clients put before the user's own words."""
    return f"<system-reminder>\n{blocks(rng, size)}\n</system-reminder>\n"
