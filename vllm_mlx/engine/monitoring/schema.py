"""The types of the engine's part of `/v1/status`, and the values from which it is written."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from ...cache.node import Hit, ResumeRule
from ...cache.stats import DiskReport, TreeStats
from ...core.config import ModelInfo
from ...core.figure import counter, gauge
from ...core.memory import MemoryBudget, RowFootprint
from ...core.receipt import Shortfall, Tier
from ...ranks.figures import RankRow
from ...runner.device import DeviceUsage
from ...scheduler.ahead import Fate
from ...scheduler.residence import State
from .counters import Outcome, Quantiles, RunningReply, Stalls

if TYPE_CHECKING:  # so that a server without an engine need not load MLX's libraries
    from ...runner.calibrate import Calibration


class ModelFacts(TypedDict):
    """Properties of the checkpoint and of how it is served."""

    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    weights_bytes: int
    takes_chats: bool  # it has a chat template
    template_needs: list[str]  # the rules by which conversations are rewritten for the template
    takes_images: bool
    takes_videos: bool
    no_videos: str | None
    max_pixels: int | None  # most pixels of an image; larger ones are scaled down
    no_shared_forward: str | None  # why rows of different lengths decode in separate forward passes
    no_drafts: str | None  # why no drafts are verified
    no_head: str | None  # why the MTP head that the checkpoint has or names does not draft
    bytes_per_token: int
    fixed_bytes_per_row: int
    sliding_windows: list[int]
    resumes_anywhere: bool
    keeps_recurrent_state: bool
    copied_whole: list[str]  # unknown classes of layers, whose state is copied whole into snapshots
    prefix_cache: bool
    no_prefix_cache: str | None  # why the model's state cannot be cached
    reasoning_parser: str | None
    tool_call_parser: str | None
    prefill_tokens_per_s_at_load: float
    max_num_seqs: int
    max_stall_ms: float
    created: int


class LatencyStatus(TypedDict):
    """Durations of the last minute, in seconds."""

    window_s: float
    ttft_s: Quantiles
    inter_token_s: Quantiles
    queue_s: Quantiles
    prefill_s: Quantiles
    e2e_s: Quantiles


class DeviceStatus(TypedDict):
    """Memory as MLX counts it."""

    active_memory_gb: float
    peak_memory_gb: float
    cache_memory_gb: float
    limit_memory_gb: float


class SystemStatus(TypedDict):
    """The operating system's figures; null where it does not report them, as on Linux."""

    process_memory_gb: float | None
    pressure: str | None  # normal, warning or critical


class ProcessStatus(TypedDict):
    """The memory of the process by holder, in bytes. The parts add up to `total_bytes`.

    `other_bytes` is the rest: Python, libraries, compiled grammars, free memory of the C allocator. It is negative if
    not all that MLX counts is in memory, and null like `total_bytes` if the system does not report the total.
    """

    total_bytes: int | None
    mlx_active_bytes: int
    mlx_freed_bytes: int
    pixels_bytes: int
    replies_bytes: int
    other_bytes: int | None


class MemoryStatus(TypedDict):
    """The memory budget by use, in bytes."""

    total_bytes: int
    weights_bytes: int
    transient_bytes: int
    live_bytes: int
    cache_bytes: int
    media_bytes: int
    image_bytes: int
    lacking_bytes: int
    free_bytes: int


class PressureStatus(TypedDict):
    """Counts of the measures against a lack of memory or places, in the order in which they are taken."""

    shorter_chunks: int
    cache_evictions: int
    image_evictions: int
    waiting: int
    preemptions: int
    refused: int


class CacheStatus(TypedDict):
    """The prefix cache. Only a cache that is enabled has the fields that are not required.

    `hits_by_tier` counts replies by the slowest tier that their cached tokens came from. `disk` is null if a setting
    turns it off.
    """

    enabled: bool
    hits: int
    hits_by_kind: dict[Hit, int]
    hits_by_tier: dict[Tier, int]
    misses: int
    hit_rate: float
    evictions: int
    evicted_mb: NotRequired[float]
    tokens_saved: int
    current_memory_mb: float
    max_memory_mb: float
    memory_utilization: float
    entry_count: int
    num_states: NotRequired[int]
    num_buffers: NotRequired[int]
    index_mb: NotRequired[float]
    inserts_refused: NotRequired[int]
    shortfalls: dict[Shortfall, int]
    disk: DiskReport | None


class ImageStatus(TypedDict):
    """The cache of image features. `max_memory_mb` is given only if the model takes images."""

    enabled: bool
    encoded: Annotated[int, counter("images_encoded", "Runs of the vision encoder.")]
    longest_encode_s: float
    evictions: Annotated[int, counter("image_evictions", "Evictions from the cache of image features.")]
    entry_count: int
    current_memory_mb: float
    max_memory_mb: NotRequired[float]


class DraftStatus(TypedDict):
    """The worth of drafts. `parked`: the reason why none are verified at the moment, although they are enabled.

    `num_passes` counts forward passes with drafts, and `num_drafts` the rows that had drafts in them.
    `tokens_per_pass` is how many tokens such a row got from a pass, on average; without drafts it gets one.
    """

    enabled: bool
    off_reason: str | None
    parked: str | None
    num_passes: int
    num_drafts: Annotated[int, counter("vllm:spec_decode_num_drafts", "Drafts verified, one for each reply and pass.")]
    drafted_tokens: Annotated[dict[str, int], counter("draft_tokens", "Tokens that were drafted, by source.", "source")]
    accepted_tokens: Annotated[
        dict[str, int], counter("accepted_draft_tokens", "Drafted tokens that were accepted, by source.", "source")
    ]
    accepted_by_position: list[int]  # the first number counts accepted first tokens of drafts
    tokens_per_pass: float


class Counts(TypedDict):
    """Ended requests and tokens since the start, and tokens per second in the last seconds."""

    total_requests_processed: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_disk_tokens: int
    total_completion_tokens: int
    total_encoded_inputs: int  # texts whose vectors or scores were computed
    total_encoded_tokens: int  # of these texts; part of the prompt tokens
    generation_tps: float
    prompt_tps: float


class LaneRow(TypedDict):
    """A model on the engine thread.

    Its weights are in memory (ready, leaving), on their way (loading), or not (the other states), and `weights_bytes`
    are taken for them now. `progress` is the share of a load that is done, and `cause` says why the last load failed.
    `last_used_s` counts seconds since the last request or command to load, `loads` counts loads by their cause,
    and `load_s` is the duration of the last load after the start.
    """

    pinned: bool
    state: State
    progress: float | None
    weights_bytes: int
    missing_bytes: Annotated[
        int, gauge("model_bytes_missing", "Bytes of the weights that were still in memory after the last unload.")
    ]
    last_used_s: float
    running: Annotated[int, gauge("vllm:num_requests_running", "Running replies.")]
    waiting: Annotated[int, gauge("vllm:num_requests_waiting", "Waiting replies.")]
    loads: Annotated[dict[str, int], counter("model_loads", "Loads of the weights, by what asked for them.", "reason")]
    load_s: Annotated[float, gauge("model_load_seconds", "Seconds that the last load after the start took.")]
    cause: str | None
    ahead_tokens: Annotated[
        dict[Fate, int], counter("ahead_tokens", "Tokens computed ahead of a next question, and their use.", "fate")
    ]


class ModelRow(Counts, LaneRow):
    """A model of the server."""

    name: str
    outcomes: dict[Outcome, int]
    drafts: DraftStatus


class EngineFigures(Counts):
    """Rates, latencies, counts, memory and the prefix cache, of all requests together."""

    status: str
    model: str | None  # null, like all facts of the first model, before any was asked for
    architecture: str | None
    max_model_len: int | None
    uptime_s: float
    steps_executed: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_restarts: int
    rate_window_s: float
    latency: LatencyStatus
    stalls: Stalls
    outcomes: dict[Outcome, int]
    metal: DeviceStatus
    system: SystemStatus
    process: ProcessStatus
    memory: MemoryStatus
    shrinking: PressureStatus
    cache: CacheStatus
    images: ImageStatus
    drafts: DraftStatus
    ahead_tokens: dict[Fate, int]  # computed ahead of a next question; used ones; ones that can never be used
    models: list[ModelRow]
    ranks: NotRequired[list[RankRow]]  # only of a model that several Macs run
    model_facts: ModelFacts | None
    build: dict[str, str]  # versions
    report_age_s: float


class EngineStatus(EngineFigures):
    """The figures, and the replies that wait or run."""

    requests: list[RunningReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about the checkpoint on this machine, found at load."""

    info: ModelInfo
    memory: MemoryBudget
    footprint: RowFootprint
    calibration: "Calibration"
    resume_rule: ResumeRule | None = None  # None if state cannot be copied
    is_recurrent: bool = False  # some layers keep recurrent state
    copied_whole: tuple[str, ...] = ()  # classes of the layers whose state is copied whole
    no_prefix_cache: str | None = None  # why no prefix of this model is cached; None if prefixes are cached
    video_fault: str | None = None  # why videos are refused; None if they are served
    max_pixels: int | None = None  # most pixels of an image, or None if the model takes none
    no_shared_forward: str | None = None  # why rows of different lengths need several forward passes, if so
    no_drafts: str | None = None  # why no drafts are verified; None if they are
    no_head: str | None = None  # why an MTP head does not draft; None if it does, or if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """The state of a lane between two steps. Times are seconds."""

    row: LaneRow
    num_preemptions: Annotated[
        int,
        counter("vllm:num_preemptions", "Replies that were preempted: they gave their memory back and continue later."),
    ]
    num_restarts: int  # restarts of rows that lost their state to a fault that another row may have caused
    live_bytes: int  # state of all rows, including padding
    lacking_bytes: int  # that were planned for rows and caches, and that the device turned out not to have
    num_shortened: int  # times that memory pressure made prefill chunks shorter
    num_skipped_captures: int  # snapshots that were not stored because memory was short
    images: ImageStatus
    drafts: DraftStatus
    media_bytes: int  # image features that are cached
    build_s: Annotated[
        float,
        gauge("model_build_seconds", "Seconds of that load in which the model was built, and nothing else ran."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The state of the engine between two steps."""

    num_steps: Annotated[int, counter("steps", "Steps of the engine.")]
    device: DeviceUsage
    lanes: tuple[LaneReport, ...]  # by the positions of their models
    images: ImageStatus  # of all models together, like the next one
    drafts: DraftStatus
    cache: TreeStats | None  # None if the prefix cache is off
    disk: DiskReport | None = None  # None if a setting turns it or the prefix cache off
    reading: frozenset[int] = frozenset()  # seq_ids of waiting sequences whose state is being read from disk
    ranks: tuple[RankRow, ...] = ()  # of a model that several Macs run
