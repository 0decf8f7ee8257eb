"""How many bytes a row's state takes at a given length, and how many there are. Arithmetic only: asks no device."""

from dataclasses import dataclass

from .errors import ConfigError

ALLOCATION_STEP = 256  # cache buffers grow by this many token slots


def allocated_slots(num_tokens: int) -> int:
    """Token slots of a buffer made for `num_tokens`."""
    return -(-num_tokens // ALLOCATION_STEP) * ALLOCATION_STEP


def most_slots(num_tokens: int) -> int:
    """Token slots that a buffer of `num_tokens` may occupy: one merged or cut at any length grows by whole steps."""
    return num_tokens + ALLOCATION_STEP - 1 if num_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFootprint:
    """State of one row: attention KV grows with every token, a window up to its size, recurrent state not at all."""

    bytes_per_token: int
    fixed_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()  # (window in tokens, bytes per token), a pair per window size

    def bytes_at(self, num_tokens: int) -> int:
        slots = most_slots(num_tokens)
        windowed = sum(min(slots, allocated_slots(window)) * size for window, size in self.windows)
        return self.fixed_bytes + slots * self.bytes_per_token + windowed

    def copy_bytes(self, num_tokens: int) -> int:
        """A copy of the state of `num_tokens` successive tokens, to the byte."""
        windowed = sum(min(num_tokens, window) * size for window, size in self.windows)
        return self.fixed_bytes + num_tokens * self.bytes_per_token + windowed

    def max_tokens(self, budget_bytes: int) -> int:
        """The longest row that fits `budget_bytes`; 0 if none does."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= budget_bytes else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """`total = weights + transients + pictures + what live rows and caches may take`.

    Raises ConfigError when nothing is left for rows.
    """

    total_bytes: int
    weights_bytes: int
    transient_bytes: int  # activations of one prefill chunk, or of one image in the tower: measured at load
    pictures_bytes: int = 0  # tensors that wait for the vision tower
    decoded_bytes: int = 0  # pixels of pictures decoded lately
    known_bytes: int = 0  # texts and ids that pictures shown lately stand for

    def __post_init__(self) -> None:
        if self.rows_bytes <= 0:
            sees = bool(self.pictures_bytes)
            raise ConfigError(
                f"Too little memory: the model needs {_gb(self.weights_bytes)} and one prefill chunk"
                f"{' or image' if sees else ''} {_gb(self.transient_bytes)}, the budget is {_gb(self.total_bytes)}. "
                f"Use a smaller or more strongly quantised model, lower --max-prefill-chunk"
                f"{' and --max-pixels' if sees else ''}, or raise --memory-budget."
            )

    @property
    def rows_bytes(self) -> int:
        return self.total_bytes - self.weights_bytes - self.transient_bytes - self.all_pictures_bytes

    @property
    def all_pictures_bytes(self) -> int:
        """What is set aside for pictures before the tower sees them."""
        return self.pictures_bytes + self.decoded_bytes + self.known_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """Bytes that the device took beyond its limit in one step: measured, where a budget is reckoned."""

    peak_bytes: int = 0  # at the highest moment
    kept_bytes: int = 0  # still, when the step was over


NO_OVERRUN = Overrun()


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
