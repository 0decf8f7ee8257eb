"""The types of `/v1/status`, its history and `/v1/cache`, as clients see them. The engine adds its own figures."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ..cache.node import Space
from ..cache.stats import Entry
from ..core.receipt import Tier
from ..engine.monitoring.counters import ReplyProgress
from ..engine.monitoring.schema import CacheStatus, EngineFigures


class LastReply(TypedDict):
    """A reply that has ended. `model` is the name that was asked for, and `served_by` the first name of that model.

    `tokens_per_s` is the speed of the tokens after the first; `finish` ends with `left` if the client cut the reply.
    """

    time: float
    request_id: str | None
    client: str | None
    path: str
    model: str | None
    served_by: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    duration_s: float
    tokens_per_s: float | None
    finish: str
    disk_tokens: int
    tier: Tier | None
    expected_tokens: int
    why: str | None


class OtherReplies(TypedDict):
    """The last replies to other API keys, as one sum."""

    num_replies: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class LastError(TypedDict):
    """A request that failed. `request_id`, `client` and `message` are null if it was sent with another API key."""

    time: float
    request_id: str | None
    client: str | None
    path: str
    status: int
    code: str | None
    message: str | None


class ServerStatus(EngineFigures):
    """The engine's figures, running requests, and the last replies and errors, newest first. Times are Unix times."""

    time: float
    served_model_names: list[str]
    requests: list[ReplyProgress]
    last_replies: list[LastReply]
    other_replies: OtherReplies
    last_errors: list[LastError]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry(Entry):
    """A run of tokens in the prefix cache: the tokens `start` to `end` of the prompts that share it.

    `fingerprint` is the model's; `salted` says whether the run belongs to an API key or has a salt.
    """

    space: Annotated[Space, Field(exclude=True)]  # it contains the salt
    age_s: float
    fingerprint: str
    salted: bool


class OtherEntries(TypedDict):
    """The entries of other API keys, as one sum."""

    num_entries: int
    num_tokens: int
    num_bytes: int


class CacheTree(TypedDict):
    """The prefix cache: its entries, each of which follows its parent, sums of other API keys' entries, and figures.

    `disk` has the entries that are kept on disk, of all checkpoints: the ones used last, and their ancestors.
    """

    object: Literal["list"]
    data: list[CacheEntry]
    disk: list[CacheEntry]
    others: OtherEntries
    others_on_disk: OtherEntries
    cache: CacheStatus


class Sample(TypedDict):
    """Figures of one moment. Rates cover the last ten seconds, latencies the last minute."""

    time: float
    generation_tps: float
    prompt_tps: float
    num_running: int
    num_waiting: int
    ttft_p50_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None


class StatusHistory(TypedDict):
    """Samples of the last ten minutes, one every `every_s` seconds, oldest first.

    `age_s` is the age of the last one in seconds, which grows if samples fail; null if there is none.
    """

    object: Literal["list"]
    every_s: float
    age_s: float | None
    data: list[Sample]
