"""Attacks drawn by number: which field holds which hostile value, of what size, and how the request is sent.

The same number, protocol and scale draw the same attack. A smaller scale draws a smaller one of the same kind.
"""

import base64
import functools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .driver import Attack
from .fields import Document, Field
from .media import comma_video, frames, odd_image
from .protocols import PROTOCOLS, Protocol
from .schemas import SCHEMAS, odd_grammar, odd_regex, odd_schema
from .target import ATTACKER, PIXEL_BYTES
from .values import ANY, dumps, long_text, number, repeated
from .wire import Shot, chunked, cut, request

LEAST_BYTES, MOST_BYTES = 1 << 10, 4 << 20
HUGE_BYTES = 250 << 20  # a little below the default of --max-body
PACK_BYTES = 16 << 20
SENT = ("whole", "whole", "whole", "whole", "whole", "leave", "leave", "crowd", "slow", "cut", "pipelined", "chunked")


@dataclass(frozen=True, slots=True)
class Case:
    """An attack, and benign requests of its size on as many connections."""

    kind: str
    attack: Attack
    benign: Attack
    repeat: str  # the command that runs it again


class Drawing:
    """Draws the cases of one protocol."""

    def __init__(
        self, protocol: str, document: Document, *, most_bytes: int = MOST_BYTES, is_huge: bool = True
    ) -> None:
        self._protocol = PROTOCOLS[protocol]
        self._most_bytes = most_bytes
        self._is_huge = is_huge
        self._fields = {path: document.fields(path, _base(self._protocol, path)) for path in self._protocol.paths}
        self._document = document

    def draw(self, seed: int, scale: float = 1.0) -> Case:
        chance = random.Random(f"{self._protocol.name} {seed}")
        num_bytes = max(64, int(self._size(chance) * scale))
        path = chance.choice(self._protocol.paths)
        sent = chance.choice(SENT)
        name, body = chance.choice(self._kinds())(chance, num_bytes, path)
        data = dumps(body)
        repeat = f"scripts/fuzz --what harm --protocol {self._protocol.name} --case {seed}"
        if scale != 1.0:
            repeat += f" --scale {scale:g}"
        title = f"{path}, {name}, {len(data)} bytes, sent {sent}"
        shots = _shots(chance, path, data, sent)
        pixel_bytes = PIXEL_BYTES if "odd image" in name or "odd video" in name else 0
        return Case(
            name, Attack(title, path, shots, pixel_bytes=pixel_bytes), self._benign(path, len(data), len(shots)), repeat
        )

    def _size(self, chance: random.Random) -> int:
        """Rarely as much as the server takes."""
        if chance.random() < 0.005 and self._is_huge:
            return chance.choice([HUGE_BYTES // 4, HUGE_BYTES])
        return int(LEAST_BYTES * (self._most_bytes / LEAST_BYTES) ** chance.random())

    def _benign(self, path: str, num_bytes: int, num_shots: int) -> Attack:
        body = self._protocol.conversation(num_bytes)
        if path.endswith("count_tokens"):
            body.pop("max_tokens")
        shot = Shot((request(path, dumps(body), ATTACKER),))
        return Attack(f"benign, {num_bytes} bytes", path, (shot,) * num_shots)

    def _kinds(self) -> list[Callable[[random.Random, int, str], tuple[str, Any]]]:
        protocol = self._protocol
        kinds = [self._field] * 6 + [self._pieces, self._text, self._sampling]
        kinds += [self._tool] * 2 if protocol.tool else []
        kinds += [self._guide] * 2 if protocol.guide else []
        kinds += [self._image] if protocol.spoken.image_place else []
        kinds += [self._video] if protocol.name == "chat" else []
        kinds += [self._thoughts] if protocol.thoughts else []
        return kinds

    def _field(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        field = chance.choice(self._fields[path])
        value, kind = self._value(chance, field, num_bytes)
        body = field.plant(value)
        if isinstance(body, dict) and chance.random() < 0.3:
            body = {**chance.choice(self._protocol.others), **body}
        return f"{kind} in {field.name}", body

    def _value(self, chance: random.Random, field: Field, num_bytes: int) -> tuple[Any, str]:
        if self._document.takes(field.schema, "array") and chance.random() < 0.5:
            item = self._document.item(field.schema)
            return repeated(item, num_bytes), f"{dumps(item)[:60].decode()} again and again"
        if self._document.takes(field.schema, "object") and chance.random() < 0.3:
            return odd_schema(chance, num_bytes), "an odd schema"
        if self._document.takes(field.schema, "string") and chance.random() < 0.5:
            text = long_text(chance, num_bytes)
            return text, f"{text[:12]!r} again and again"
        draw = chance.choice(ANY)
        return draw(chance, num_bytes), draw.__name__

    def _pieces(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        """Many small parts or many small messages."""
        piece = self._protocol.text(chance.choice(["", "a"]))
        turn = self._protocol.say("", chance.choice(["user", "assistant"]))[self._protocol.list_name]
        if self._protocol.name == "completions":
            prompt = chance.choice([repeated("", num_bytes), repeated([1], num_bytes), repeated("a", num_bytes)])
            return "small prompts", self._on(path, {"prompt": prompt, "max_tokens": 1})
        if chance.random() < 0.5:
            return "small parts", self._on(path, self._protocol.say(repeated(piece, num_bytes)))
        body = {**self._protocol.say("x"), self._protocol.list_name: repeated(turn[0], num_bytes)}
        return "small messages", self._on(path, body)

    def _text(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        text = long_text(chance, num_bytes)
        return f"{text[:12]!r} as a long text", self._on(path, self._protocol.say(text))

    def _sampling(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        """What decides how tokens are drawn and where replies end."""
        num = max(1, num_bytes // 8)
        limit = "max_output_tokens" if self._protocol.name == "responses" else "max_tokens"
        fields: dict[str, Callable[[], Any]] = {
            "logit_bias": lambda: {str(at): chance.choice([-100, 1.5, 100]) for at in range(num)},
            "stop": lambda: chance.choice(
                [["a" * num_bytes + "z"], repeated("ab", num_bytes), ["a" * 50] * (num // 8)]
            ),
            "stop_sequences": lambda: chance.choice([["a" * num_bytes + "z"], repeated("ab", num_bytes)]),
            "stop_token_ids": lambda: chance.choice([repeated(5, num_bytes), [number(chance, num_bytes)]]),
            "n": lambda: chance.choice([64, 128, 1024, 1025, number(chance, 1000)]),
            "top_logprobs": lambda: 20,
            limit: lambda: chance.choice([number(chance, 1000), 10**9]),
            "seed": lambda: number(chance, 1000),
            "prompt": lambda: chance.choice([list(range(num)), repeated(1, num_bytes), [[1]] * num, [10**30], [-1]]),
            "cache_salt": lambda: long_text(chance, num_bytes),
            "temperature": lambda: number(chance, 1000),
            "metadata": lambda: {f"k{at}": "v" for at in range(num)},
        }
        name = chance.choice(list(fields))
        return f"an odd {name}", self._on(path, {**self._protocol.say("Hi"), name: fields[name]()})

    def _tool(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        assert self._protocol.tool is not None
        choice, draw = chance.choice(["auto", "strict", "required"]), chance.choice(SCHEMAS)
        body = self._protocol.tool(draw(chance, min(num_bytes, 250_000)), choice)
        return f"a tool with a schema of {draw.__name__} ({choice})", self._on(path, body)

    def _guide(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        assert self._protocol.guide is not None
        kind, num_bytes = chance.choice(self._protocol.guides), min(num_bytes, 250_000)
        values: dict[str, Callable[[], Any]] = {
            "guided_regex": lambda: odd_regex(chance, num_bytes),
            "guided_grammar": lambda: odd_grammar(chance, num_bytes),
            "guided_choice": lambda: [f"choice {at}" for at in range(max(1, num_bytes // 16))],
        }
        value = values.get(kind, lambda: odd_schema(chance, num_bytes))()
        return f"an odd {kind}", self._on(path, self._protocol.guide(kind, value))

    def _image(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        body = self._protocol.image(odd_image(chance, num_bytes))
        content = body[self._protocol.list_name][0]["content"]
        image, num = content[0], chance.choice([1, 1, 2, 4, 20, 101])
        most = max(1, self._most_bytes // max(1, len(dumps(image))))
        body[self._protocol.list_name][0]["content"] = [image] * min(num, most) + content[1:]
        return f"{min(num, most)} odd images", self._on(path, body)

    def _video(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        if chance.random() < 0.5:
            part: Any = {"type": "video", "video": frames(chance, num_bytes)}
        else:
            part = {"type": "video_url", "video_url": {"url": comma_video(chance, num_bytes)}}
        return f"an odd video ({part['type']})", self._protocol.say([part, self._protocol.text("What is this?")])

    def _thoughts(self, chance: random.Random, num_bytes: int, path: str) -> tuple[str, Any]:
        """Sealed reasoning that unpacks to far more than it is."""
        assert self._protocol.thoughts is not None
        word = sealed_word(chance.choice([b"a", b"word ", b"\xff"]))
        num = max(1, num_bytes // len(word))
        return f"{num} sealed thoughts", self._on(path, self._protocol.thoughts(word, num))

    def _on(self, path: str, body: Any) -> Any:
        return _fitted(path, body)


@functools.cache
def sealed_word(unit: bytes) -> str:
    """Reasoning as this server packs it for clients that keep it."""
    return "vllm-mlx.1." + base64.urlsafe_b64encode(zlib.compress(unit * (PACK_BYTES // len(unit)))).decode()


def _base(protocol: Protocol, path: str) -> dict[str, Any]:
    return _fitted(path, protocol.say("Hi"))


def _fitted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """To count tokens takes no limit on the reply."""
    if path.endswith("count_tokens"):
        return {name: value for name, value in body.items() if name != "max_tokens"}
    return body


def _shots(chance: random.Random, path: str, data: bytes, sent: str) -> tuple[Shot, ...]:
    whole = request(path, data, ATTACKER)
    if sent == "leave":
        return (Shot((whole,), num_answers=0),) * chance.choice([1, 3])
    if sent == "crowd":
        return (Shot((whole,)),) * chance.choice([2, 4, 8])
    if sent == "slow":
        return (Shot(cut(whole, 20), pause_s=0.05),) * chance.choice([1, 3])
    if sent == "cut":
        incomplete = request(path, data, ATTACKER, declared=len(data) + 1000)
        return (Shot(cut(incomplete, 3), pause_s=0.1, num_answers=0),) * chance.choice([1, 3])
    if sent == "pipelined":
        num = min(200, max(2, MOST_BYTES // len(whole)))
        return (Shot((whole * num,), num_answers=chance.choice([0, 1]), must_answer=False),)
    if sent == "chunked":
        return (Shot((chunked(path, data, ATTACKER, chance.choice([1, 7, 4000]) if len(data) < 1 << 20 else 4000),)),)
    return (Shot((whole,)),)
