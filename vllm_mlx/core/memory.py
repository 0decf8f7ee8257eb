"""The bytes that a row's state takes at a given length, and the bytes available. It asks no device."""

import enum
import math
import os
import threading
from dataclasses import dataclass

from .errors import ConfigError, setting

ALLOCATION_STEP = 256  # cache buffers grow by this many token slots
SHORTEST_CHUNK = 64  # tokens of a prefill chunk for which memory is always planned


def allocated_slots(num_tokens: int) -> int:
    """Token slots of a buffer that is allocated for `num_tokens`."""
    return -(-num_tokens // ALLOCATION_STEP) * ALLOCATION_STEP


def most_slots(num_tokens: int) -> int:
    """Most token slots of a buffer with `num_tokens`: one merged or cut at any length grows by complete steps."""
    return num_tokens + ALLOCATION_STEP - 1 if num_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFootprint:
    """Memory of one row's state: attention KV grows with every token, windows up to their size, recurrent state never.

    State of other layers is copied whole. It grows with every token.
    """

    bytes_per_token: int
    whole_bytes_per_token: int = 0  # layers that are copied whole
    fixed_bytes: int = 0  # recurrent layers, and the constant part of layers that are copied whole
    spare_bytes: int = 0  # free slots of chunked layers, at most
    windows: tuple[tuple[int, int], ...] = ()  # (window in tokens, bytes per token), one pair per window size
    num_layers: int = 1  # layers that grow with every token, which hold most of a long row

    def bytes_at(self, num_tokens: int) -> int:
        slots = most_slots(num_tokens)
        windowed = sum(min(slots, allocated_slots(window)) * size for window, size in self.windows)
        growing = slots * (self.bytes_per_token + self.whole_bytes_per_token)
        return self.fixed_bytes + growing + windowed + (self.spare_bytes if num_tokens else 0)

    def copy_bytes(self, num_tokens: int, length: int | None = None) -> int:
        """Exact size of a copy of `num_tokens` successive tokens, with the state at their end.

        They end at position `length`, or begin with the row's first token if it is None. The size of layers that are
        copied whole is an upper bound, because their buffers have free slots.
        """
        windowed = sum(min(num_tokens, window) * size for window, size in self.windows)
        whole = most_slots(num_tokens if length is None else length) * self.whole_bytes_per_token
        return self.fixed_bytes + num_tokens * self.bytes_per_token + windowed + whole

    def layer_bytes(self, rows_bytes: int) -> int:
        """Return the part of `rows_bytes` to keep free for copying one layer of all rows when a row joins a batch."""
        return rows_bytes // (self.num_layers + 1)

    def max_tokens(self, budget_bytes: int) -> int:
        """Length of the longest row that fits `budget_bytes`; 0 if none fits."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= budget_bytes else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Memory of the attention scores of one prefill chunk: it grows with the chunk times the context.

    It is zero on a device that computes attention without keeping scores.
    """

    bytes_per_pair: int = 0  # one pair: a token of the chunk and a token that it may attend to
    room_bytes: int = 0  # most that a chunk may take; longer chunks are cut

    @classmethod
    def within(cls, room_bytes: int, *, bytes_per_pair: int, max_chunk: int, max_tokens: int) -> "AttentionCost":
        """Return the cost with the room that chunks need: at most `room_bytes`, and enough for SHORTEST_CHUNK tokens.

        If that takes more than four times `room_bytes`, chunks at the end of the context are shorter still.
        `max_chunk`: tokens of the longest chunk. `max_tokens`: tokens of the longest prompt.
        """
        needed, least = (bytes_per_pair * min(n, max_tokens) * max_tokens for n in (max_chunk, SHORTEST_CHUNK))
        room = max(min(least, 4 * room_bytes), min(needed, room_bytes))
        return cls(bytes_per_pair=bytes_per_pair, room_bytes=room)

    def longest_chunk(self, start: int) -> int:
        """Most tokens of a chunk after `start` others: the largest n with `n · (start + n)` pairs in the room."""
        if not self.bytes_per_pair:
            return 1 << 40
        num_pairs = self.room_bytes // self.bytes_per_pair
        return max(1, (math.isqrt(start * start + 4 * num_pairs) - start) // 2)

    def most_rows(self, length: int) -> int:
        """Return the number of whole texts of `length` tokens whose scores have room together."""
        return self.room_bytes // (self.bytes_per_pair * length**2) if self.bytes_per_pair else 1 << 40


@dataclass(frozen=True, slots=True)
class Budget:
    """All memory that the process may take, and the largest part of it for each purpose."""

    total_bytes: int
    held_bytes: int = 0  # weights of other models, which stay in memory

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.held_bytes

    @property
    def scores_bytes(self) -> int:
        """Attention scores of a chunk, where the device keeps them."""
        return self.total_bytes // 16

    @property
    def forced_bytes(self) -> int:
        """Attention scores beyond which a slower kernel that keeps none is forced."""
        return self.total_bytes // 32

    @property
    def join_bytes(self) -> int:
        """Copies while a row joins others: a model of few layers needs more only if all memory is in rows."""
        return self.total_bytes // 16

    @property
    def inputs_bytes(self) -> int:
        """Encoder inputs of recent images. Their pixels, and compiled grammars, may take as much."""
        return self.total_bytes // 64

    @property
    def rendered_bytes(self) -> int:
        """Texts and ids of recent images: some 70 kB for a full-HD one."""
        return self.total_bytes // 256

    def check_weights(self, model: str, num_bytes: int) -> None:
        """Raise ConfigError if the weights alone do not fit."""
        if num_bytes > self.free_bytes:
            raise ConfigError(
                f"Too little memory: the weights of {model} take {readable(num_bytes)}, {self.text}. Use a smaller "
                f"or more strongly quantised model, or raise {setting('memory_budget')}."
            )

    @property
    def text(self) -> str:
        """Describe the budget, and the part that other models hold."""
        held = f", of which other models hold {readable(self.held_bytes)}" if self.held_bytes else ""
        return f"the budget is {readable(self.total_bytes)}{held}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """`total = held + weights + transients + images + grammars + rows`; rows are running rows and caches together.

    Raises ConfigError if nothing is left for rows.
    """

    total_bytes: int
    held_bytes: int = 0  # weights of other models, which stay in memory
    weights_bytes: int
    transient_bytes: int  # activations of one prefill chunk or one image in the encoder, measured at load
    encoder_inputs_bytes: int = 0  # encoder inputs that wait for the vision encoder
    decoded_bytes: int = 0  # pixels of images and clips kept for the next turn
    rendered_bytes: int = 0  # texts and token ids of images and videos rendered for earlier requests
    grammars_bytes: int = 0  # compiled grammars that are kept

    def __post_init__(self) -> None:
        if self.rows_bytes <= 0:
            sees = bool(self.encoder_inputs_bytes)
            and_pixels = f" and {setting('max_pixels')}" if sees else ""
            raise ConfigError(
                f"Too little memory: the model needs {readable(self.weights_bytes)} and one prefill chunk"
                f"{' or image' if sees else ''} {readable(self.transient_bytes)}, "
                f"{Budget(self.total_bytes, self.held_bytes).text}. "
                f"Use a smaller or more strongly quantised model, lower {setting('max_prefill_chunk')}"
                f"{and_pixels}, or raise {setting('memory_budget')}."
            )

    @property
    def rows_bytes(self) -> int:
        used_bytes = self.weights_bytes + self.transient_bytes + self.media_bytes + self.grammars_bytes
        return self.total_bytes - self.held_bytes - used_bytes

    @property
    def media_bytes(self) -> int:
        """Memory for images before the vision encoder has run."""
        return self.encoder_inputs_bytes + self.decoded_bytes + self.rendered_bytes


class ByteRoom:
    """A byte budget that all requests share. Safe to share between threads."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.Lock()

    def enter(self, num_bytes: int) -> bool:
        """Return whether there was room."""
        with self._lock:
            has_room = self.num_bytes + num_bytes <= self.max_bytes
            self.num_bytes += num_bytes if has_room else 0
            return has_room

    def leave(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes


class Pressure(enum.Enum):
    """Memory pressure of the machine, caused by all programs together."""

    NORMAL = "normal"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMemory:
    """The operating system's figures. A figure that it does not report is None."""

    footprint_bytes: int | None = None  # charged to this process, compressed memory included
    pressure: Pressure | None = None


UNKNOWN_SYSTEM = SystemMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """Bytes by which a step exceeded the device's limit: measured, whereas a budget is computed."""

    peak_bytes: int = 0  # at the peak
    kept_bytes: int = 0  # still in use after the step
    pressure: Pressure = Pressure.NORMAL  # the machine's, however little this process uses


NO_OVERRUN = Overrun()


def readable(num_bytes: float) -> str:
    """Write a number of bytes in GB, or in MB if it is smaller than one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 999.95e6 else f"{num_bytes / 1e6:.1f} MB"


def physical_memory() -> int:
    """Return the machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
