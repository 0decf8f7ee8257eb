"""A worker: it carries out the plans of rank 0 on its shard, and decides nothing. It reads no token.

It branches on no clock, on no memory and on nothing that fails here alone, so that all ranks compute the same.
"""

from typing import Any

import mlx.core as mx

from ..cache.shared import Event
from ..core.step import PrefillChunk, Snapshot, TokenOutput
from ..runner.device import DeviceWatch
from ..runner.model import Model
from ..runner.runner import RowFences
from .channel import Message
from .lockstep import Ranks
from .runner import PrefillContext, RankRunner
from .watch import STOP
from .wire import Unpacker


class Worker(RankRunner):
    def __init__(self, model: Model, watch: DeviceWatch, prefill_context: PrefillContext, ranks: Ranks):
        super().__init__(model, watch, prefill_context, ranks)
        self.kept: dict[int, Any] = {}  # this rank's slices of shared state, by name
        self._unpacker = Unpacker(self.kept)

    def work(self) -> None:
        """Execute plans until rank 0 says that it stops. Raises the error that ends this rank, and so all ranks."""
        while STOP not in (message := self._ranks.peers[0].hear()):
            self.follow(message)

    def follow(self, message: Message) -> None:
        """Carry out one plan."""
        self._ranks.watch.begin(message["n"], 0)
        if message.get("reset"):
            self.reset()
        for event in message["events"]:
            self._heed(event)
        plan = self._unpacker.plan(message)
        self._name(plan, message["first"])
        self.decode(plan)
        if plan.prefill:
            self.prefill(plan.prefill)
        rows = {seq_id for batch in self.batches for seq_id in batch.seq_ids}
        self._unpacker.forget(rows | self._prefilled.keys())

    def _heed(self, event: Event) -> None:
        match event:
            case [name]:
                self.kept.pop(name, None)  # it is unknown if a rank could not copy it
            case [name, at, left, right]:
                self.kept[left], self.kept[right] = self.kept[name].split(at)

    def _stored(self, name: int, snapshot: Snapshot) -> Snapshot:
        self.kept[name] = snapshot.segment
        if snapshot.state is not None:
            self.kept[name + 1] = snapshot.state
        return snapshot

    def _step(self, fences: RowFences) -> list[TokenOutput]:
        """Launch the forward passes. An unevaluated one would skip its collectives, and all ranks would hang."""
        for batch in self.batches:
            batch.start()
        return []

    def _run_chunk(self, chunk: PrefillChunk, fences: RowFences) -> float | None:
        seconds = super()._run_chunk(chunk, fences)
        mx.synchronize()  # without Python's lock, with which `clear_cache` would wait, and stop the watch of ranks
        return seconds

    def _check_device(self) -> None:
        """Do not wait: the next plan comes while the device works. A failure ends the rank at the next chance."""
        mx.async_eval(self._probe + 1)  # type: ignore[no-untyped-call]
