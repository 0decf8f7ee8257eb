"""The bundled checkpoint behind real sockets: names what pictures show, in every protocol, alone and in a crowd."""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.rows import cases, row
from tests.support.shapes import draw_shape

QUESTION = "What is in this image?"
SHOWN = (
    ("red", "circle"), ("blue", "square"), ("green", "star"), ("yellow", "triangle"),
    ("purple", "circle"), ("orange", "square"), ("red", "star"), ("blue", "triangle"),
)  # fmt: skip
SIDE = 112
MODEL, SETTINGS = "demo", {"enable_thinking": False}


def encoded(color: str, shape: str, side: int = SIDE) -> str:
    file = io.BytesIO()
    draw_shape(color, shape, side).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(shown: tuple[str, str], side: int = SIDE) -> str:
    return f"data:image/png;base64,{encoded(*shown, side)}"


def ask(
    gpt: openai.OpenAI, *shown: tuple[str, str], question: str = QUESTION, sides: Sequence[int] = (SIDE,) * 8
) -> str:
    """`sides`: of the images, in the same order."""
    urls = [data_url(one, side) for one, side in zip(shown, sides, strict=False)]
    content: Any = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": question})
    reply = gpt.chat.completions.create(model="tiny", temperature=0, messages=[{"role": "user", "content": content}])
    return str(reply.choices[0].message.content)


def names(reply: str, *shown: tuple[str, str]) -> bool:
    return all(word in reply for one in shown for word in one)


@row("S0-15")
def test_each_picture_is_named_alone_and_eight_at_once_with_text_in_between(gpt: openai.OpenAI) -> None:
    alone = [ask(gpt, shown) for shown in SHOWN[:4]]
    assert [names(reply, shown) for reply, shown in zip(alone, SHOWN, strict=False)] == [True] * 4, alone
    with ThreadPoolExecutor(16) as pool:
        seen = [pool.submit(ask, gpt, shown, question=f"{QUESTION} ") for shown in SHOWN]
        sums = [pool.submit(ask, gpt, question=f"What is {number} + 2?") for number in range(1, 9)]
        crowd = [future.result() for future in seen]
        said = [future.result() for future in sums]
    assert [names(reply, shown) for reply, shown in zip(crowd, SHOWN, strict=True)] == [True] * len(SHOWN), crowd
    assert [str(number + 2) in reply for number, reply in enumerate(said, 1)] == [True] * 8, said


@row("S0-15")
@pytest.mark.parametrize("sides", cases([(SIDE, SIDE), (SIDE, 2 * SIDE), (3 * SIDE // 2, SIDE)], [(SIDE, 2 * SIDE)]))
def test_two_pictures_of_one_message_are_told_apart(gpt: openai.OpenAI, sides: tuple[int, int]) -> None:
    reply = ask(gpt, SHOWN[0], SHOWN[1], question="What is in these images?", sides=sides)
    assert names(reply, *SHOWN[:2]), reply


def test_the_same_question_of_another_picture_of_its_size_gets_another_answer(gpt: openai.OpenAI) -> None:
    for shown in (("green", "square"), ("purple", "star"), ("green", "square")):
        assert names(ask(gpt, shown), shown)
