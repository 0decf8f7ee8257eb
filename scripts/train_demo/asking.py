"""Ways to ask a checkpoint: in this process through mlx-vlm, or over HTTP through a running server. Greedy, always."""

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from PIL import Image

from .chat import Assistant, Call, Turn, User, messages, reply_text
from .pictures import Picture

MAX_NEW_TOKENS = 160


class Asker(Protocol):
    """Gives the reply after `turns` (reasoning and all, or the answer alone) and the number of prompt tokens."""

    num_workers: int  # questions it can be asked at a time

    def reply(self, turns: tuple[Turn, ...], tools: list[dict] | None, thinking: bool) -> tuple[str, int]: ...


def images(turns: tuple[Turn, ...]) -> list[Image.Image]:
    return [p.image for t in turns if isinstance(t, User) for p in t.parts if isinstance(p, Picture)]


class Greedy:
    """A checkpoint in mlx-vlm."""

    num_workers = 1

    def __init__(self, folder: Path):
        from mlx_vlm import load

        self.model, self.processor = load(str(folder))
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)

    def reply(self, turns: tuple[Turn, ...], tools: list[dict] | None, thinking: bool) -> tuple[str, int]:
        return self.complete(messages(turns), tools, thinking, images(turns))

    def complete(
        self, wire: list[dict], tools: list[dict] | None, thinking: bool, pictures: list[Image.Image]
    ) -> tuple[str, int]:
        from mlx_vlm import generate

        prompt = self.tokenizer.apply_chat_template(
            wire, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        result = generate(
            self.model, self.processor, prompt, image=pictures or None, max_tokens=MAX_NEW_TOKENS, temperature=0.0
        )
        return result.text.removesuffix("<|im_end|>"), result.prompt_tokens


class Served:
    """A model behind `/v1/chat/completions` of the server at `url`."""

    num_workers = 8

    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        with urllib.request.urlopen(f"{self.url}/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def reply(self, turns: tuple[Turn, ...], tools: list[dict] | None, thinking: bool) -> tuple[str, int]:
        body = {
            "model": self.model,
            "messages": wire_messages(turns),
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
            "chat_template_kwargs": {"enable_thinking": thinking},
            **({"tools": tools} if tools else {}),
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.url} refused a question: {error.read().decode()}") from error
        (choice,) = told["choices"]
        said, length = choice["message"], told["usage"]["prompt_tokens"]
        made = [c["function"] for c in said.get("tool_calls") or []]
        try:
            calls = tuple(Call(f["name"], json.loads(f["arguments"])) for f in made)
        except json.JSONDecodeError:  # a call that was cut short
            return json.dumps(said), length
        return reply_text(Assistant(said["content"] or "", "", "", calls)), length


def wire_messages(turns: tuple[Turn, ...]) -> list[dict]:
    """As a client sends them: pictures as data URLs, calls with ids and their arguments as JSON text."""
    pictures, waiting = iter(images(turns)), iter(())
    sent = messages(turns)
    for index, message in enumerate(sent):
        if isinstance(message["content"], list):
            message["content"] = [
                part if "text" in part else picture_part(next(pictures)) for part in message["content"]
            ]
        if message["role"] == "assistant":
            waiting = numbered(message.get("tool_calls", []), index)
        if message["role"] == "tool":
            message["tool_call_id"] = next(waiting)
    return sent


def numbered(calls: list[dict], index: int) -> Iterator[str]:
    """Gives each call an id and tells the ids."""
    for i, call in enumerate(calls):
        call["id"] = f"call_{index}_{i}"
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return iter([call["id"] for call in calls])


def picture_part(image: Image.Image) -> dict:
    packed = io.BytesIO()
    image.save(packed, "PNG")
    data = base64.b64encode(packed.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
