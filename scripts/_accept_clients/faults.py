"""What goes wrong on purpose between a client and the server. Answers in the envelopes of the server itself."""

from dataclasses import dataclass

from starlette.responses import Response

from vllm_mlx.core.errors import ContextLengthExceeded
from vllm_mlx.server.error_handlers import envelope_of, respond

OVERFLOW = ContextLengthExceeded(num_prompt_tokens=33_000, max_model_len=32_768)
ALWAYS = 10**6


@dataclass(frozen=True, slots=True)
class Refuse:
    """`status` 0: the prompt is too long."""

    status: int
    retry_after_s: float | None = None

    def answer(self, path: str) -> Response:
        if not self.status:
            return respond(envelope_of(path).error(OVERFLOW))
        answer = respond(envelope_of(path).status(self.status, "This fault was put in between."))
        if self.retry_after_s is not None:
            answer.headers["retry-after"] = f"{self.retry_after_s:g}"
        return answer


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream ends after so many events: abruptly, or as if it were whole."""

    after_events: int
    is_abrupt: bool = True


@dataclass(frozen=True, slots=True)
class Fault:
    """Hits `times` requests of the agent from number `first` on, counted from 0."""

    name: str
    what: Refuse | Cut
    first: int = 0
    times: int = 1


FAULTS = (
    Fault("cut in mid-stream", Cut(5)),
    Fault("cut at once", Cut(1)),
    Fault("cut late", Cut(9)),
    Fault("ends without its last event", Cut(5, is_abrupt=False)),
    Fault("429, retry-after 2", Refuse(429, 2)),
    Fault("503, retry-after 2", Refuse(503, 2)),
    Fault("429 bare", Refuse(429), times=2),
    Fault("500 twice", Refuse(500), times=2),
    Fault("529 twice", Refuse(529), times=2),
    Fault("500 for ever", Refuse(500), times=ALWAYS),
    Fault("429 for ever", Refuse(429), times=ALWAYS),
    Fault("400", Refuse(400), times=ALWAYS),
    Fault("401", Refuse(401), times=ALWAYS),
    Fault("404", Refuse(404), times=ALWAYS),
    Fault("too long, at the second request", Refuse(0), first=1),
    Fault("too long, always", Refuse(0), times=ALWAYS),
)
