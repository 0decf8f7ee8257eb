"""The samples of client packages' own READMEs: which of them run against this server, and why the others do not.

A sample is read from the installed package and run as it is: the address comes from variables, and the server answers
to the names of models that the samples ask for. Starts nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MODELS = (
    "demo",
    "claude-opus-5-5",
    "claude-sonnet-4-20250514",
    "gpt-4o",
    "gpt-4o-mini",
    "gpt-5.4-mini",
    "gpt-5.5",
    "gpt-5.6-luna",
    "gpt-5.6-sol",
)

_VENDOR = "a service of the vendor"
_REALTIME = "the vendor's realtime or voice service"
_IDENTITY = "the vendor's sign-in"
_FRAGMENT = "a fragment that names what it does not make"
_CLOUD = "another cloud's service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One block of Python of a README. `asks`: whether the server gets a request for a reply."""

    after: tuple[int, ...] = ()  # blocks that run before it, in one program
    before: str = ""  # our own code before it
    asks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`samples`: the README's blocks of Python by number, counted from 1; a text says why a block is not run."""

    name: str
    version: str
    requirements: tuple[str, ...]  # what pip installs
    unpinned: tuple[str, ...] = ()  # what it installs without requirements, for its README
    samples: Mapping[int, Sample | str]
    own: Mapping[str, str] = field(default_factory=dict)  # our own samples, where the README has none

    @property
    def spec(self) -> str:
        return f"{self.name}=={self.version}"


_PICTURE = """
import pathlib, struct, zlib
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
rows = b''.join(b'\\0' + bytes((255, 0, 0)) * 64 for _ in range(64))
header = struct.pack('>IIBBBBB', 64, 64, 8, 2, 0, 0, 0)
png = chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')
pathlib.Path('path/to').mkdir(parents=True)
pathlib.Path('path/to/image.png').write_bytes(bytes((137, 80, 78, 71, 13, 10, 26, 10)) + png)
"""
_ASYNC = "from openai import AsyncOpenAI\nclient = AsyncOpenAI()\n"
_LANGCHAIN = """
from langchain.agents import create_agent
from {module} import {chat}
model = {chat}(model="demo", max_tokens=200)
print(model.invoke("What is 2 + 3?").text)
print("".join(chunk.text for chunk in model.stream("Count to 5.")))
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
agent = create_agent(model, tools=[add])
print(agent.invoke({{"messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}})["messages"][-1].text)
"""
_LLM = """
import os, subprocess, sys
endpoint = [sys.executable, "-m", "llm", "openai", "endpoint", os.environ["OPENAI_BASE_URL"], "-m", "demo"]
subprocess.run([*endpoint, "What is the capital of France?"], check=True)
subprocess.run([*endpoint, "--chat"], input="What is 2 + 3?\\nexit\\n", text=True, check=True)
"""

PACKAGES = (
    Package(
        name="openai",
        version="3.54.0",
        requirements=("openai[aiohttp]==3.54.0",),
        samples={
            **dict.fromkeys((1, 2, 11, 12, 13, 14, 21, 29, 30, 32, 40), Sample()),
            **dict.fromkeys((3, 4, 5, 6, 7, 8), _IDENTITY),
            9: "an image of the internet",
            10: Sample(before=_PICTURE),
            **dict.fromkeys((15, 16), _REALTIME),
            **dict.fromkeys((17, 18, 19, 20, 22, 23), _VENDOR),
            **dict.fromkeys((24, 25), "webhooks of the vendor"),
            26: Sample(asks=False),  # it shows what is done about an error, which it gets
            **dict.fromkeys((27, 28), Sample(before=_ASYNC)),
            31: _FRAGMENT,
            33: Sample(after=(2,)),
            34: "an endpoint that does not exist",
            **dict.fromkeys((35, 36), "an address that stands for the reader's own"),
            **dict.fromkeys((37, 38), "certificates of the reader's own"),
            **dict.fromkeys((39, 46), Sample(asks=False)),
            **dict.fromkeys((41, 42, 43, 44, 45), _CLOUD),
        },
    ),
    Package(name="anthropic", version="2.12.0", requirements=("anthropic==2.12.0",), samples={1: Sample()}),
    Package(
        name="pydantic-ai",
        version="2.38.0",
        requirements=("pydantic-ai-slim[openai,anthropic]==2.38.0",),
        unpinned=("pydantic-ai==2.38.0",),
        samples={
            1: "another package, and a terminal",
            2: _FRAGMENT,
            3: Sample(),
            4: _REALTIME,
            5: "a Temporal server",
            6: "images as replies",
            7: "embeddings",
            8: "longer texts than the demo ends by itself",
        },
    ),
    Package(
        name="openai-agents",
        version="0.24.0",
        requirements=("openai-agents==0.24.0",),
        samples={1: Sample(), 2: "a repository on GitHub", 3: _REALTIME, 4: _REALTIME},
    ),
    Package(
        name="langchain-openai",
        version="1.7.3",
        requirements=("langchain==1.4.7", "langchain-openai==1.7.3"),
        samples={},
        own={"a question, a stream, an agent": _LANGCHAIN.format(module="langchain_openai", chat="ChatOpenAI")},
    ),
    Package(
        name="langchain-anthropic",
        version="1.7.7",
        requirements=("langchain==1.4.7", "langchain-anthropic==1.7.7"),
        samples={1: Sample(asks=False)},
        own={"a question, a stream, an agent": _LANGCHAIN.format(module="langchain_anthropic", chat="ChatAnthropic")},
    ),
    Package(
        name="llm",
        version="0.36",
        requirements=("llm==0.36",),
        samples={},
        own={"llm openai endpoint": _LLM},
    ),
    Package(
        name="litellm",
        version="1.106.2",
        requirements=("litellm==1.106.2",),
        samples={
            1: Sample(),
            2: "its own gateway",
            3: "another agent",
            4: "its own gateway",
            5: "a server of tools",
            6: "its own gateway",
        },
    ),
    Package(
        name="instructor",
        version="1.17.0",
        requirements=("instructor==1.17.0",),
        samples={
            1: Sample(),
            2: "what the package replaces: the model chooses whether to call",
            3: Sample(after=(1,)),
            4: "keys of many vendors",
            **dict.fromkeys((5, 6, 7), Sample(after=(1,))),
            8: Sample(),
        },
    ),
)

_BLOCK = re.compile(r"^[ \t]*```(?:python|py)\b[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    heading: str
    code: str


def blocks(readme: str) -> list[Block]:
    """The blocks of Python of a README, in their order."""
    prose = re.sub(r"^[ \t]*```.*?^[ \t]*```", lambda block: "\n" * len(block[0]), readme, flags=re.DOTALL | re.M)
    found = []
    for match in _BLOCK.finditer(readme):
        headings = _HEADING.findall(prose[: match.start()])
        found.append(Block(headings[-1] if headings else "", match[1]))
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """`parts` run one after the other, in one process and with the same names."""

    package: str
    sample: str
    parts: tuple[str, ...]
    asks: bool


def programs(package: Package, readme: str) -> Iterator[Program]:
    """What of a package is run. Raises KeyError if the README has other blocks than the list."""
    found = blocks(readme)
    if len(found) != len(package.samples):
        raise KeyError(f"{package.spec}: its README has {len(found)} blocks, and the list {len(package.samples)}")
    for number, sample in package.samples.items():
        if isinstance(sample, Sample):
            earlier = tuple(found[other - 1].code for other in sample.after)
            parts = (sample.before, *earlier, found[number - 1].code)
            yield Program(package.name, f"{number}, {found[number - 1].heading}", parts, sample.asks)
    for name, code in package.own.items():
        yield Program(package.name, f"our own: {name}", (code,), True)
