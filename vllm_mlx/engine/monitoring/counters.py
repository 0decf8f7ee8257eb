"""Counts the progress of each reply, and totals, on the event loop. Knows no other part of the server."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Annotated, Literal, get_args

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ...core.events import FinishReason
from ...core.figure import Figure, counter, gauge
from ...core.receipt import CacheReceipt, Expectation, Shortfall, Tier
from ...core.request import Request
from ...core.sequence import Sequence
from ...core.step import SequenceUpdate

RATE_WINDOW_S = 10.0
SAMPLE_WINDOW_S = 60.0
MAX_SAMPLES = 10_000
# The buckets of vLLM's histograms of the same names, so that its dashboards fit.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REPLY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
Phase = Literal["queued", "prefill", "generation"]
Outcome = Literal["stop", "length", "tool_calls", "aborted", "cancelled", "failed"]
OUTCOMES: dict[FinishReason, Outcome] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.ABORT: "aborted",
}


class TokenRate:
    """Tokens per second over the last RATE_WINDOW_S."""

    def __init__(self, started_s: float):
        self._started_s = started_s
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int, now: float) -> None:
        self._marks.append((now, num_tokens))
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        num_tokens = sum(num_tokens for _, num_tokens in self._marks)
        return num_tokens / max(1e-3, min(RATE_WINDOW_S, now - self._started_s))

    def _forget(self, now: float) -> None:
        while self._marks and self._marks[0][0] < now - RATE_WINDOW_S:
            self._marks.popleft()


class Quantiles(TypedDict):
    """Number, median, 99th percentile and maximum of the last minute's values; None if there are no values."""

    count: int
    p50: float | None
    p99: float | None
    max: float | None


class Histogram:
    """Counts values by bucket since the start, and keeps those of the last SAMPLE_WINDOW_S that come with their time.

    Like in Prometheus, a bucket holds the values up to its bound.
    """

    def __init__(self, bounds: tuple[float, ...], name: str, help: str):
        self.figure = Figure("histogram", f"vllm:{name}", help)
        self.bounds = bounds
        self._counts = [0] * (len(self.bounds) + 1)
        self._marks: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self.sum = 0.0

    def add(self, value: float, now: float | None = None) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if now is not None:
            self._marks.append((now, value))

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield (bound, number of values that do not exceed it). The last bound is infinite."""
        return zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True)

    def quantiles(self, now: float) -> Quantiles:
        while self._marks and self._marks[0][0] < now - SAMPLE_WINDOW_S:
            self._marks.popleft()
        values = sorted(seconds for _, seconds in self._marks)
        if not values:
            return {"count": 0, "p50": None, "p99": None, "max": None}
        # the smallest values that half of all, and 99 % of all, do not exceed
        p50, p99 = (round(values[ceil(share * len(values)) - 1], 5) for share in (0.50, 0.99))
        return {"count": len(values), "p50": p50, "p99": p99, "max": round(values[-1], 5)}


class ReplyProgress(TypedDict):
    """The progress of a waiting or running reply.

    `client` is the client's user agent. It and `request_id` are null if the request was sent with another API key.
    """

    request_id: str | None
    client: str | None
    model: str
    path: str
    status: Literal["waiting", "running"]
    phase: Phase
    waits_for: Literal["disk", "model"] | None  # before it runs, state is read from disk, or weights are loaded
    elapsed_s: float
    queue_s: float
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    max_tokens: int
    progress: float
    tokens_per_second: float
    ttft_s: float | None
    cache_hit_type: str | None  # null until the prompt is looked up
    cached_tokens: int
    disk_tokens: int
    tier: Tier | None
    expected_tokens: int
    why_not_cached: str | None


class RunningReply(ReplyProgress):
    """A waiting or running reply, and the owner of its request."""

    tenant: str


@dataclass(slots=True, kw_only=True)
class ReplyStats:
    """The progress of one reply. Times are seconds of the monotonic clock."""

    request_id: str
    seq_id: int | None = None  # None while the prompt is prepared
    tenant: str = ""  # the owner of the request
    model: int = 0  # the position of its model
    client: str | None = None
    path: str = ""
    prompt_tokens: int = 0  # 0 while the prompt is prepared
    max_tokens: int
    arrived_s: float  # when the request came, before its prompt was prepared
    queued_s: float  # when the sequence was handed to the engine; before that, when its preparation began
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome | None = None  # None until the reply has ended
    expectation: Expectation = field(default_factory=Expectation)
    template: tuple[str, ...] = ()  # as in a receipt
    receipt: CacheReceipt | None = None  # None: not looked up yet
    computed_tokens: int = 0  # prompt tokens that are computed, including cached ones
    encoded_inputs: int = 0  # texts of which an encoder has computed the vectors or scores
    completion_tokens: int = 0

    @classmethod
    def of(cls, request: Request, now: float) -> "list[ReplyStats]":
        """Return the progress of the replies to a request that has just arrived."""
        num_replies = request.sampling.n
        return [
            cls(
                request_id=request.request_id if num_replies == 1 else f"{request.request_id}-{index}",
                tenant=request.tenant,
                model=request.model,
                client=request.client,
                path=request.path,
                max_tokens=request.sampling.max_tokens or 0,
                arrived_s=now if request.arrived_s is None else request.arrived_s,
                queued_s=now,
            )
            for index in range(num_replies)
        ]

    def queue(self, seq: Sequence, expectation: Expectation, template: tuple[str, ...], now: float) -> None:
        """Note that the prompt is prepared and its sequence handed to the engine."""
        self.seq_id, self.prompt_tokens, self.max_tokens = seq.seq_id, seq.num_prompt_tokens, seq.max_tokens
        self.queued_s, self.expectation, self.template = now, expectation, template

    def take(self, update: SequenceUpdate, now: float) -> int:
        """Take in an update. Returns the prompt tokens that were computed since the previous one."""
        if self.receipt is None:
            self.scheduled_s = update.scheduled_s
            receipt = replace(update.receipt, prompt_tokens=self.prompt_tokens, expectation=self.expectation)
            self.receipt = replace(receipt, template=self.template)
            self.computed_tokens = self.receipt.cached_tokens
        computed = min(self.prompt_tokens, max(self.computed_tokens, update.num_computed_tokens))
        if update.tokens:
            computed = self.prompt_tokens
            self.first_token_s = self.first_token_s if self.first_token_s is not None else now
            self.last_token_s = now
            self.completion_tokens += len(update.tokens)
        self.encoded_inputs = max(self.encoded_inputs, update.num_encoded)
        new, self.computed_tokens = computed - self.computed_tokens, computed
        return new

    def end(self, outcome: Outcome, now: float) -> None:
        """Record how the reply ended. Later calls are ignored."""
        if self.outcome is None:
            self.outcome, self.ended_s = outcome, now

    @property
    def phase(self) -> Phase:
        if self.first_token_s is not None:
            return "generation"
        return "queued" if self.receipt is None else "prefill"

    @property
    def queue_s(self) -> float | None:
        """Return the time that the sequence waited for a place; None while it waits."""
        return None if self.scheduled_s is None else max(0.0, self.scheduled_s - self.queued_s)

    def describe(self, now: float, models: Items[tuple[str, bool]], reading: Collection[int] = ()) -> RunningReply:
        """Describe the reply for the status. `reading`: the seq_ids of sequences that wait for the disk.

        `models`: the name of each model, and whether its weights are in memory.
        """
        name, has_model = models[self.model]
        waits_for: Literal["disk", "model"] | None = None
        if self.phase == "queued" and self.seq_id is not None:
            waits_for = "model" if not has_model else "disk" if self.seq_id in reading else None
        # of the present phase: tokens that are allowed, or those of the prompt, which are 0 while it is prepared
        done, most = self.computed_tokens, max(1, self.prompt_tokens)
        if self.phase == "generation":
            done, most = self.completion_tokens, max(1, self.max_tokens)
        decoding_s = 0.0 if self.first_token_s is None else now - self.first_token_s
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "client": self.client,
            "model": name,
            "path": self.path,
            "status": "waiting" if self.phase == "queued" else "running",
            "phase": self.phase,
            "waits_for": waits_for,
            "elapsed_s": round(now - self.arrived_s, 3),
            "queue_s": round(now - self.queued_s if self.queue_s is None else self.queue_s, 4),
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "completion_tokens": self.completion_tokens,
            "max_tokens": self.max_tokens,
            "progress": round(done / most, 4),
            "tokens_per_second": round((self.completion_tokens - 1) / decoding_s, 2) if decoding_s > 0 else 0.0,
            "ttft_s": None if self.first_token_s is None else round(self.first_token_s - self.arrived_s, 4),
            "cache_hit_type": None if self.receipt is None else self.receipt.hit,
            "cached_tokens": 0 if self.receipt is None else self.receipt.cached_tokens,
            "disk_tokens": 0 if self.receipt is None else self.receipt.disk_tokens,
            "tier": None if self.receipt is None else self.receipt.tier,
            "expected_tokens": 0 if self.receipt is None else self.receipt.expected_tokens,
            "why_not_cached": None if self.receipt is None else self.receipt.why,
        }


@dataclass(slots=True, kw_only=True)
class Stalls:
    """Gaps between two tokens of one reply that exceeded `max_stall_ms`."""

    threshold_s: float
    total: Annotated[int, counter("stalls", "Gaps between two tokens that exceed the stall limit.")] = 0
    longest_s: Annotated[
        float, gauge("longest_stall_seconds", "The longest gap between two tokens that exceeded the stall limit.")
    ] = 0.0

    def add(self, gap_s: float) -> None:
        if gap_s > self.threshold_s:
            self.total += 1
            self.longest_s = max(self.longest_s, round(gap_s, 4))


class Totals:
    """Counts over all replies of one model since the start, or over the replies of all models."""

    requests: Annotated[int, counter("requests", "Ended requests, with any outcome.")]
    outcomes: Annotated[dict[Outcome, int], counter("replies", "Ended replies by outcome.", "outcome")]
    tiers: Annotated[
        dict[Tier, int],
        counter("cache_hits", "Replies with cached tokens, by the slowest tier that these came from.", "tier"),
    ]
    shortfalls: Annotated[
        dict[Shortfall, int],
        counter(
            "cache_shortfalls",
            "Replies with fewer cached tokens than the previous turn made likely, by reason.",
            "reason",
        ),
    ]
    prompt_tokens: Annotated[int, counter("vllm:prompt_tokens", "Prompt tokens, including cached ones.")]
    cached_tokens: Annotated[int, counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")]
    completion_tokens: Annotated[int, counter("vllm:generation_tokens", "Sampled tokens.")]
    computed_tokens: Annotated[int, counter("prefill_tokens", "Prompt tokens that were computed.")]
    encoded_inputs: Annotated[int, counter("encoded_inputs", "Texts whose vectors or scores were computed.")]
    encoded_tokens: Annotated[int, counter("encoded_tokens", "Tokens of these texts, which are prompt tokens too.")]

    def __init__(self, *, started_s: float, stall_threshold_s: float, of_all: "Totals | None" = None):
        """`of_all`: the totals of all models, which count along."""
        self._counted = (self,) if of_all is None else (self, of_all)
        self.started_s = started_s
        self.requests = self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.computed_tokens = 0
        self.encoded_inputs = self.encoded_tokens = 0
        self.disk_tokens = 0  # part of cached_tokens
        self.outcomes, self.tiers = dict.fromkeys(get_args(Outcome), 0), dict.fromkeys(get_args(Tier), 0)
        self.shortfalls = dict.fromkeys(Shortfall, 0)
        self.prompt_rate = TokenRate(started_s)  # computed prompt tokens
        self.completion_rate = TokenRate(started_s)
        self.stalls = Stalls(threshold_s=stall_threshold_s)
        text = "Seconds from the arrival of a request to its"
        self.ttft = Histogram(TTFT_S, "time_to_first_token_seconds", f"{text} first token.")
        self.gap = Histogram(GAP_S, "inter_token_latency_seconds", "Seconds between two tokens of one reply.")
        self.e2e = Histogram(REPLY_S, "e2e_request_latency_seconds", f"{text} last token.")
        self.queue = Histogram(REPLY_S, "request_queue_time_seconds", "Seconds that a sequence waits for a place.")
        self.prefill = Histogram(REPLY_S, "request_prefill_time_seconds", "Seconds from admission to the first token.")
        self.decode = Histogram(REPLY_S, "request_decode_time_seconds", "Seconds from the first token to the last.")
        self.prompt_sizes = Histogram(TOKENS, "request_prompt_tokens", "Prompt tokens of finished replies.")
        self.reply_sizes = Histogram(TOKENS, "request_generation_tokens", "Sampled tokens of finished replies.")

    def take(self, stats: ReplyStats, update: SequenceUpdate, now: float) -> None:
        """Count an update. This runs for each token of each row, so keep it short."""
        if update.error is None:
            is_new, last_token_s = stats.receipt is None, stats.last_token_s
            computed = stats.take(update, now)
            for totals in self._counted:
                if is_new:
                    totals._scheduled(stats, now)
                if computed:
                    totals.computed_tokens += computed
                    totals.prompt_rate.add(computed, now)
                if update.tokens:
                    totals._sampled(stats, len(update.tokens), last_token_s, now)

    def end(self, replies: Items[ReplyStats]) -> None:
        """Count a request that has ended, with all of its replies and any outcome."""
        for totals in self._counted:
            totals.requests += 1
            for stats in replies:
                totals._ended(stats)

    def _ended(self, stats: ReplyStats) -> None:
        assert stats.outcome is not None and stats.ended_s is not None, "it has ended"
        self.outcomes[stats.outcome] += 1
        self.encoded_inputs += stats.encoded_inputs
        self.encoded_tokens += stats.computed_tokens if stats.encoded_inputs else 0
        if stats.outcome in ("stop", "length", "tool_calls"):
            self.e2e.add(stats.ended_s - stats.arrived_s, stats.ended_s)
            self.prompt_sizes.add(stats.prompt_tokens)
            self.reply_sizes.add(stats.completion_tokens)
            if stats.first_token_s is not None:
                self.decode.add(stats.ended_s - stats.first_token_s, stats.ended_s)

    def _sampled(self, stats: ReplyStats, num_tokens: int, last_token_s: float | None, now: float) -> None:
        self.completion_tokens += num_tokens
        self.completion_rate.add(num_tokens, now)
        if last_token_s is None:
            self.ttft.add(now - stats.arrived_s, now)
            if stats.scheduled_s is not None:
                self.prefill.add(max(0.0, now - stats.scheduled_s), now)
        else:
            self.gap.add(now - last_token_s, now)
            self.stalls.add(now - last_token_s)
        for _ in range(num_tokens - 1):  # tokens that arrive in one update have no gap between them
            self.gap.add(0.0, now)

    def _scheduled(self, stats: ReplyStats, now: float) -> None:
        self.prompt_tokens += stats.prompt_tokens
        receipt = stats.receipt
        assert receipt is not None, "it was looked up"
        self.cached_tokens += receipt.cached_tokens
        self.disk_tokens += receipt.disk_tokens
        if receipt.tier is not None:
            self.tiers[receipt.tier] += 1
        if receipt.shortfall is not None:
            self.shortfalls[receipt.shortfall] += 1
        if stats.queue_s is not None:
            self.queue.add(stats.queue_s, now)
