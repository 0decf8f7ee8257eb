"""Brings a model into memory: builds its modules in one pause, reads their weights in slices. It knows no library."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

SLICE_BYTES = 32 << 20  # of weights that are read between two steps; not measured on a Mac


class Checked(Protocol):
    """A model that can tell whether its weights are sound."""

    def check_logits(self) -> None:
        """Raise ValueError if they are not."""


T = TypeVar("T", bound=Checked)


class Loading(Generic[T]):
    """A model on its way. All its arrays belong to the thread that calls `advance`."""

    def __init__(
        self,
        build: Callable[[], list[Any]],
        make: Callable[..., T],
        explaining: Callable[[], AbstractContextManager[None]],
        *,
        slice_bytes: int = SLICE_BYTES,
    ):
        """`build` gives the modules, whose weights are not read yet, and `make` turns them into the model.

        `explaining` is entered around the library's work: it raises ModelLoadError instead of the library's errors.
        """
        self._build, self._make, self._explaining = build, make, explaining
        self._slice_bytes = slice_bytes
        self._modules: list[Any] = []
        self._slices: Iterator[list[mx.array]] = iter(())
        self._num_bytes = self._read_bytes = 0
        self.build_s = 0.0  # the one pause that cannot be divided
        self.most_bytes = 0  # of a slice

    @property
    def progress(self) -> float:
        """Return the share of the weights that was read."""
        return self._read_bytes / self._num_bytes if self._num_bytes else 0.0

    def advance(self) -> T | None:
        """Build the modules, or read the next slice. Returns the model once it is complete. Raises ModelLoadError."""
        with self._explaining():
            if not self._modules:
                start = time.perf_counter()
                self._modules = self._build()
                weights = [array for module in self._modules for _, array in tree_flatten(module.parameters())]
                self._num_bytes = sum(array.nbytes for array in weights)
                self._slices = slices(weights, self._slice_bytes)
                self.build_s = time.perf_counter() - start
                return None
            if (arrays := next(self._slices, None)) is None:
                model = self._make(*self._modules)
                model.check_logits()
                return model
            mx.eval(arrays)
        num_bytes = sum(array.nbytes for array in arrays)
        self._read_bytes, self.most_bytes = self._read_bytes + num_bytes, max(self.most_bytes, num_bytes)
        return None

    def check(self) -> None:
        """Build only the modules, so that missing tensors are known before weights are read. Raises ModelLoadError."""
        with self._explaining():
            self._build()

    def unread(self) -> T:
        """Return the model, of which only the structure is needed: no weights are read. Raises ModelLoadError."""
        with self._explaining():
            return self._make(*self._build())

    def complete(self) -> T:
        """Do all parts. Raises ModelLoadError."""
        while (model := self.advance()) is None:
            pass
        return model


def slices(arrays: Iterable[mx.array], most_bytes: int) -> Iterator[list[mx.array]]:
    """Divide arrays into lists of at most `most_bytes`. A larger one is a separate list."""
    held: list[mx.array] = []
    num_bytes = 0
    for array in arrays:
        if held and num_bytes + array.nbytes > most_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(array)
        num_bytes += array.nbytes
    if held:
        yield held
