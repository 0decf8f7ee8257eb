"""Finds words that the style rules out: in docstrings, comments, names, texts for users, and prose."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# A word or phrase, and what to write in its place. Words that are right in another sense are not listed.
BANNED = {
    r"of late": "recently, recent",
    r"anew": "again",
    r"under way": "running",
    r"whatever it is": "name what it may be",
    r"apart": "isolated, alone, separately",
    r"mend(s|ed|ing)?": "fix",
    r"(giv(e|es|ing|en)|gave) way": "yield, is evicted",
    r"as they came": "in order of arrival",
    r"those that": "the ones that, or the noun",
    r"towers?": "vision encoder",
    r"pictures?": "image",
    r"thoughts?": "reasoning",
    r"what is there": "say what it is",
    r"(is|are|was|were) had": "is fetched, is read",
    r"made of": "built from",
    r"reckon(s|ed|ing)?": "plan, compute",
    r"told": "reported, sent",
}
PREPOSITIONS = frozenset({"of", "as", "behind", "beside", "for", "among"})
NAMES = frozenset({"thought", "thoughts", "tower", "picture", "pictures"})  # parts of identifiers
WIRE_NAMES = frozenset({"pictures_bytes"})  # keys of replies that clients read
FORMATS = ("thought process:", "<|channel>thought")  # ends of texts that models write, which must stay as they are
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
_NOTES = re.compile(r"^(noqa|type: ignore|fmt:|pragma)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Line and fault of a module's docstrings, comments, texts and names."""
    notes, texts = [*_docstrings(source), *_comments(source)], list(_texts(source))
    for line, text in (*notes, *(found for found in texts if found[1][:1].isupper())):
        if begins_with_preposition(text):
            yield line, f"begins with a preposition: {text[:60]}"
    for line, text in (*notes, *texts):
        yield from ((line, f"{found}: write {advice}") for found, advice in banned_in(text))
    yield from _names(source)


def begins_with_preposition(text: str) -> bool:
    """Whether it may lack a subject: `Of all rows.`, not `For each row, do something.`"""
    words = re.findall(r"\w+", text)
    sentence = re.split(r"[.;:]\s|\n", text, maxsplit=1)[0]
    is_sentence = text[:1].isupper() and "," in sentence
    return bool(words) and words[0].lower() in PREPOSITIONS and not is_sentence


def in_prose(page: str) -> Iterator[tuple[int, str]]:
    """Line and fault of a Markdown page, outside of code."""
    prose = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page)
    for line, text in enumerate(prose.splitlines(), 1):
        yield from ((line, f"{found}: write {advice}") for found, advice in banned_in(text))


def banned_in(text: str) -> Iterator[tuple[str, str]]:
    for match in _BANNED.finditer(text):
        yield match[0], next(advice for word, advice in BANNED.items() if re.fullmatch(word, match[0], re.IGNORECASE))


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Each text that is a statement of its own: also the help text below a setting."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Texts in the code that a user may read: messages, helps, labels. What stands between backticks is code."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(str(text)) if id(node) not in docstrings and not text.endswith(FORMATS):
                yield node.lineno, re.sub(r"`[^`\n]*`", "`code`", text)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Each comment on its own lines as one text, and each at the end of a line."""
    begun: tuple[int, list[str]] | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#! ")
        is_alone = not token.line[: token.start[1]].strip()
        if begun is not None and is_alone and line == begun[0] + len(begun[1]):
            begun[1].append(text)
            continue
        if begun is not None:
            yield begun[0], " ".join(begun[1])
        begun = (line, [text]) if not _NOTES.match(text) else None
        if begun is not None and not is_alone:
            yield line, text
            begun = None
    if begun is not None:
        yield begun[0], " ".join(begun[1])


def _names(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names = [name]
            case _:
                continue
        for name in names:
            parts = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
            if parts & NAMES and name not in WIRE_NAMES:
                yield node.lineno, f"the name {name}: write reasoning, vision encoder or image"
            if name == "each" and isinstance(node, ast.Name):
                yield node.lineno, "a variable named each: name the thing"


def faults_of(file: Path) -> list[str]:
    source = file.read_text(encoding="utf-8")
    found = in_python(source) if file.suffix == ".py" else in_prose(source)
    return [f"{file.name}:{line}: {fault}" for line, fault in sorted(found)]
