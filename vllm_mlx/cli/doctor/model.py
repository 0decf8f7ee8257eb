"""Does a model fit this machine, and does the whole server compute what it should? Loads the bundled demo only."""

import time

from ...core.errors import ConfigError, VLLMMLXError
from ..banner import readable
from ..models.cached import local_folder
from ..models.describe import describe
from ..settings import Settings
from .check import Check

_LITTLE_CONTEXT = 16_384  # tokens: below it, coding agents have hardly room
_QUESTIONS = ("What is 2 + 3?", "Count to 9.")
_REPLY_TOKENS = 24


def check_model(settings: Settings) -> Check:
    """By its files alone, so that nothing large is read."""
    name = f"Model {settings.model}"
    folder = local_folder(settings.model)
    if folder is None:
        from ...runner.download import is_hub_id

        if not is_hub_id(settings.model):
            return Check(name, "bad", "no folder of that name is here, and a name on Hugging Face is ORG/NAME")
        return Check(name, "warning", f"not on this machine: fetch it with `vllm-mlx models pull {settings.model}`")
    try:
        facts = describe(folder)
    except ConfigError as error:
        return Check(name, "bad", error.message)
    from ...runner.device import device_memory

    device = device_memory()
    asked = settings.memory_budget
    budget = device.default_budget_bytes if asked is None else asked.to_bytes(device.total_bytes)
    text = f"{facts.architecture}, {facts.kind}, {readable(facts.weights_bytes)} in {facts.precision}"
    left = budget - facts.weights_bytes
    if left <= 0:
        return Check(name, "bad", f"{text}: it does not fit {readable(budget)}. Take a smaller or more quantised one")
    if not facts.bytes_per_token:
        return Check(name, "good", f"{text}; {readable(left)} remain for conversations")
    room = left // facts.bytes_per_token
    text += f"; {readable(left)} remain, about {room:,} tokens of conversations"
    if room < _LITTLE_CONTEXT:
        return Check(name, "warning", f"{text}, which is little for coding agents")
    return Check(name, "good", text)


def self_test() -> Check:
    """The demo answers twice, cold and from the cache: the same tokens, and the second time less was computed."""
    from ... import LLM

    started_s = time.monotonic()
    try:
        with LLM("demo", text_only=True) as llm:
            for question in _QUESTIONS:
                if trouble := _compare(llm, question):
                    return Check("Self-test", "bad", trouble)
    except VLLMMLXError as error:
        return Check("Self-test", "bad", error.message)
    took_s = time.monotonic() - started_s
    return Check("Self-test", "good", f"cold and cached replies are equal, token by token ({took_s:.1f} s)")


def _compare(llm: object, question: str) -> str | None:
    """What is wrong."""
    from ... import LLM

    assert isinstance(llm, LLM)
    messages = [{"role": "user", "content": question}]
    cold, warm = (
        llm.chat(messages, temperature=0, max_tokens=_REPLY_TOKENS, logprobs=True)[0].outputs[0] for _ in range(2)
    )
    ids = [[each.token_id for each in reply.logprobs or ()] for reply in (cold, warm)]
    if not ids[0] or ids[0] != ids[1] or cold.reasoning != warm.reasoning:
        return f"the reply to {question!r} is {warm.text!r} from the cache and {cold.text!r} without it"
    if warm.usage is None or not warm.usage.cached_tokens:
        return f"nothing of {question!r} was found in the cache the second time"
    return None
