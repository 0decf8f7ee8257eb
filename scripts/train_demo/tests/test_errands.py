"""An agent without a tool to write files has the shell write, by words that no other command begins with."""

import random

import pytest

from scripts.train_demo import agent_tools, words
from scripts.train_demo.agent_tools import RUN, WRITE, Kit
from scripts.train_demo.chat import Assistant, Conversation
from scripts.train_demo.errands import SHELL_WRITE, Step, by_echo, call

RUNS = Step(RUN, "run `echo hello`", {"command": "echo hello"})
WRITES = Step(WRITE, "write good day to a.txt", {"path": "a.txt", "content": "good day"})


@pytest.fixture
def kit() -> Kit:
    return agent_tools.draw_kit(random.Random(1), crowd=2, size=0, without_write=1.0)


def commands(kit: Kit, *steps: Step) -> list[str]:
    return [value for step in steps for value in call(kit, step).arguments.values()]


def test_the_shell_writes(kit: Kit) -> None:
    assert commands(kit, RUNS, WRITES) == ["echo hello", 'printf "good day" > a.txt']


def test_the_first_courses_wrote_by_echo(kit: Kit) -> None:
    turns = tuple(Assistant("", "", "errand", (call(kit, step),)) for step in (RUNS, WRITES))
    told = [value for turn in by_echo(Conversation(turns)).turns for value in turn.calls[0].arguments.values()]
    assert told == ["echo hello", "echo good day > a.txt"]


def test_no_other_command_begins_so() -> None:
    rng = random.Random(2)
    assert SHELL_WRITE.split()[0] not in {words.command(rng).split()[0] for _ in range(2_000)}
