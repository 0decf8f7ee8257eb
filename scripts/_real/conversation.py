"""A conversation of twelve turns: the cached tokens of each, and the last reply again without the cache."""

from dataclasses import dataclass, field
from typing import Any

from scripts.served import Server, serving

from .checkpoints import checkpoint
from .sources import SMOLLM2, Source

QUESTIONS = (
    "What is the capital of France?", "Which river flows through it?", "Name a museum there.",
    "Who painted the Mona Lisa?", "When did he live?", "What else did he do?", "What is 12 + 30?",
    "Name three colours.", "Which of them is the sky's?", "Why is the sky blue?", "Say hello in German.",
    "What was my first question?",
)  # fmt: skip
_REPLY = 40
_MISSING = 16  # tokens of a known beginning that a template may close differently


@dataclass(slots=True)
class Conversation:
    """A chat, or for a model without a template one text that goes on."""

    is_chat: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = "A conversation between a curious person and an expert who answers in one sentence.\n"

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        self.text += f"\nQuestion: {question}\nAnswer:"

    def hear(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})
        self.text += reply

    def send(self, server: Server, **fields: Any) -> tuple[str, dict[str, Any]]:
        body = {"max_tokens": _REPLY, "temperature": 0, **fields}
        if self.is_chat:
            found = server.post("/v1/chat/completions", {**body, "messages": self.messages})
            return found["choices"][0]["message"]["content"], found["usage"]
        found = server.post("/v1/completions", {**body, "prompt": self.text, "stop": ["\n"]})
        return found["choices"][0]["text"], found["usage"]


def check(source: Source, form: str) -> tuple[bool, list[str]]:
    conversation = Conversation(is_chat=source == SMOLLM2)
    prompt, known, cached, missing, reply = 0, 0, 0, 0, ""
    first_reply = ""
    with serving(None, str(checkpoint(source, form))) as server:
        for question in QUESTIONS:
            conversation.ask(question)
            reply, usage = conversation.send(server)
            found = usage["prompt_tokens_details"]["cached_tokens"]
            missing = max(missing, known - found)
            prompt, cached = prompt + usage["prompt_tokens"], cached + found
            known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            first_reply = first_reply or reply
            if question != QUESTIONS[-1]:
                conversation.hear(reply)
        again, usage = conversation.send(server, cache_salt="another")
    is_cold = usage["prompt_tokens_details"]["cached_tokens"] == 0
    is_equal = again == reply or form != "float32"
    is_right = missing <= _MISSING and is_cold and is_equal and "Paris" in first_reply
    return is_right, [
        f"twelve turns: {cached} of {prompt} prompt tokens were cached ({cached / prompt:.1%}); of what the turn "
        f"before left, at most {max(missing, 0)} tokens were computed again",
        f"the last reply without the cache: {'equal' if again == reply else f'{again!r} instead of {reply!r}'}",
        f"the first reply: {first_reply!r}",
    ]
