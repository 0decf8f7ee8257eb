"""Rows that decode in one forward pass, in groups whose KV lies together.

A row joins and leaves a batch as a group, without a copy of its KV. Only groups that become one are copied.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import mlx.core as mx

from ..cache import layers, snapshot
from ..cache.layers import LayerCaches
from ..cache.leaving import OwnRow
from ..core.sequence import Sequence
from ..core.step import BY_HEAD, TokenOutput
from ..util.faults import DeviceFault
from .attention import by_groups
from .grouped import GroupedLayer, block_spans, spans
from .masks import Words
from .model import Model
from .sampler import Sampled, Sampler


@dataclass(slots=True)
class InFlight:
    """A launched forward pass whose samples have not been read yet."""

    seqs: list[Sequence]  # of each sample; a sequence has several behind a block of tokens
    sampled: Sampled
    vocab_size: int

    def read(self) -> list[TokenOutput]:
        """Wait for the device and return one token for each sequence of the list. Raises DeviceFault for a wrong id."""
        tokens: Any = self.sampled.tokens.tolist()
        unknown = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            raise DeviceFault(f"The device sampled {unknown}, which is not the id of a token")
        logprobs = self.sampled.read_logprobs(tokens, [seq.sampling.num_top_logprobs for seq in self.seqs])
        return [
            TokenOutput(seq.seq_id, token, logprob)
            for seq, token, logprob in zip(self.seqs, tokens, logprobs, strict=True)
        ]


@dataclass(slots=True)
class Group:
    """Rows whose KV lies in the same caches. The KV of a single row is unpadded."""

    seqs: list[Sequence]
    kv: list[Any]  # a cache object per layer that has KV
    lengths: list[int]  # tokens of each row in them
    counters: list[Any] | None = None  # the caches that are given the rows' lengths

    @property
    def seq_ids(self) -> list[int]:
        return [seq.seq_id for seq in self.seqs]

    def grow(self, num_tokens: int) -> None:
        """Note that a forward pass has added `num_tokens` tokens to each row."""
        self.lengths = [length + num_tokens for length in self.lengths]
        if self.counters is None:
            self.counters = layers.length_counters(self.kv)
        if self.counters:
            layers.set_lengths(self.counters, self.lengths)

    def take(self, index: int) -> "Group":
        """Copy one row into a new group. The row stays in this group until `keep`."""
        kv = self.kv if len(self.seqs) == 1 else layers.extract(self.kv, index, self.lengths[index])
        return Group([self.seqs[index]], kv, [self.lengths[index]])

    def keep(self, indices: list[int]) -> None:
        """Keep only the rows at `indices`."""
        if len(indices) == len(self.seqs):
            return
        self.counters = None
        self.seqs = [self.seqs[index] for index in indices]
        self.lengths = [self.lengths[index] for index in indices]
        layers.keep(self.kv, indices, self.lengths)

    def join(self, others: list["Group"]) -> None:
        """Add the rows of other groups, which are emptied."""
        groups = [self, *others]
        for group in groups:
            group.counters = None
        self.kv = layers.merge([(group.kv, group.lengths) for group in groups])
        self.seqs = [seq for group in groups for seq in group.seqs]
        self.lengths = [length for group in groups for length in group.lengths]


def regroup(groups: list[Group], wanted: list[set[int]]) -> list[Group]:
    """Make groups of these rows, each of which is in some group, and copy as few rows as possible.

    A group that is a part of a wanted one joins it without leaving its caches first.
    """
    places = {seq_id: place for place, ids in enumerate(wanted) for seq_id in ids}
    shared = Counter(  # rows that a group has in common with a wanted one
        (places[seq_id], index) for index, group in enumerate(groups) for seq_id in group.seq_ids if seq_id in places
    )
    bases: dict[int, int] = {}  # the group whose caches a wanted one takes over
    free = set(range(len(groups)))
    for (place, index), _ in shared.most_common():
        if place not in bases and index in free:
            bases[place] = index
            free.remove(index)
    arriving: list[list[Group]] = [[] for _ in wanted]
    for place, index in shared:
        if bases.get(place) != index:
            arriving[place] += _taken(groups[index], wanted[place])
    return [
        _joined(ids, groups[bases[place]] if place in bases else None, arriving[place])
        for place, ids in enumerate(wanted)
    ]


def _joined(ids: set[int], base: Group | None, others: list[Group]) -> Group:
    if base is None:
        base, *others = others
    base.keep([index for index, seq_id in enumerate(base.seq_ids) if seq_id in ids])
    if others:
        base.join(others)
    return base


def _taken(group: Group, ids: set[int]) -> list[Group]:
    """Take these rows out of a group: the group itself, if it has no others."""
    if ids.issuperset(group.seq_ids):
        return [group]
    return [group.take(index) for index, seq_id in enumerate(group.seq_ids) if seq_id in ids]


class Batch:
    """Rows that share a forward pass. Those of one group also share attention; recurrent states lie in one array.

    If rows join or leave, a new batch is made. Before its groups change, a batch must `let_go` of their caches.
    """

    def __init__(self, model: Model, groups: list[Group], states: list[Any], tokens: mx.array, structure: LayerCaches):
        """`states` has a cache object per recurrent layer, of all rows in the order of the groups."""
        self.groups = groups
        self.seqs = [seq for group in groups for seq in group.seqs]
        self.seq_ids = [seq.seq_id for seq in self.seqs]
        self._model = model
        self._states = states
        self._tokens = tokens  # (rows,) fed by the next launch
        self._structure = structure
        self._layers: list[GroupedLayer] = []  # instead of the KV caches, if rows share a forward pass
        self._caches: LayerCaches = []  # one per layer; none until a forward pass needs them
        self._sampler: Sampler | None = None
        self._logits: mx.array | None = None  # (rows, vocab) of a forward pass whose tokens are not drawn yet

    @classmethod
    def of_row(cls, model: Model, seq: Sequence, caches: LayerCaches, length: int) -> "Batch":
        """Return one row of `length` tokens that begins to decode: it feeds its next token."""
        kv, states = layers.split(caches)
        structure = model.structure if model.can_batch else caches
        return cls(model, [Group([seq], kv, [length])], states, mx.array(seq.tokens(length, length + 1)), structure)

    @classmethod
    def of(cls, groups: list[Group], held: Iterable["Batch"], places: Mapping[int, tuple["Batch", int]]) -> "Batch":
        """Return the batch of exactly these groups: the one of `held` that has them already, or a new one."""
        seqs = [seq for group in groups for seq in group.seqs]
        for batch in held:
            is_same = len(batch.groups) == len(groups) and all(map(is_, batch.groups, groups))
            if is_same and batch.seqs == seqs:
                return batch
        return cls.gather(groups, places)

    @classmethod
    def gather(cls, groups: list[Group], places: Mapping[int, tuple["Batch", int]]) -> "Batch":
        """Batch these groups, copying recurrent states only. `places`: each row's batch, and its index there."""
        runs: list[tuple[Batch, int, int]] = []
        for seq_id in (seq_id for group in groups for seq_id in group.seq_ids):
            batch, index = places[seq_id]
            if runs and runs[-1][0] is batch and runs[-1][2] == index:
                runs[-1] = (batch, runs[-1][1], index + 1)
            else:
                runs.append((batch, index, index + 1))
        first = runs[0][0]
        states = layers.gather([(batch._states, start, end) for batch, start, end in runs])
        tokens = mx.concatenate([batch._tokens[start:end] for batch, start, end in runs])
        return cls(first._model, groups, states, tokens, first._structure)

    @property
    def leaves(self) -> list[Any]:
        """Return the cache objects that hold the state of all rows."""
        return [*(leaf for group in self.groups for leaf in group.kv), *self._states]

    @property
    def nbytes(self) -> int:
        return layers.state_bytes(self.leaves)

    def launch(self, *, keeps_logits: bool = False) -> InFlight:
        """Start one forward pass and its sampling without waiting. The next launch feeds the samples.

        `keeps_logits`: `redraw` may follow.
        """
        self.forward()
        return self.draw(None, keeps_logits=keeps_logits)

    def start(self) -> mx.array:
        """Start one forward pass, which `draw` follows. Masks are computed while the device works."""
        logits = self.forward()
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return logits

    def draw(self, words: Words | None, *, keeps_logits: bool = False) -> InFlight:
        """Start the sampling after a forward pass. `words` are the masks of the rows, as the sampler takes them."""
        assert self._logits is not None, "a forward pass was started"
        sampler = self._get_sampler([1] * len(self.seqs))
        sampled = sampler.sample(self._logits, self._tokens, words, keeps_logits=keeps_logits)
        self._logits = None
        return self._sent(sampled)

    def redraw(self, words: Words) -> InFlight:
        """Repeat the sampling of the last launch with masks that were not known then."""
        assert self._sampler is not None, "a forward pass was launched"
        return self._sent(self._sampler.sample_again(words))

    def _sent(self, sampled: Sampled) -> InFlight:
        mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
        self._tokens = sampled.tokens
        return InFlight(self.seqs, sampled, self._model.vocab_size)

    def forward(self) -> mx.array:
        """Feed one token to each row -> lazy `logits: (rows, vocab)`."""
        self._logits = self.feed(self._tokens, [1] * len(self.groups))
        return self._logits

    def feed(self, tokens: mx.array, num_tokens: Rows[int]) -> mx.array:
        """Feed `tokens: (all tokens,)`, row after row -> lazy `logits: (all tokens, vocab)`.

        `num_tokens` is the number for each row of each group. It is 1 if there are recurrent layers, which would take
        tokens for rows.
        """
        if self._states and max(num_tokens) > 1:
            raise ValueError("A row of a model with recurrent layers takes one token in a shared forward pass")
        if not self._caches:
            self._assemble()
        own = list(zip(self.groups, num_tokens, strict=True))
        rows = [(seq, length, num) for group, num in own for seq, length in zip(group.seqs, group.lengths, strict=True)]
        fed = [(seq, length + place) for seq, length, num in rows for place in range(num)]
        positions = [position for _, position in fed]
        if self._layers:
            offset, parts = mx.array(positions), spans([len(group.seqs) for group in self.groups], num_tokens)
            for layer in self._layers:
                layer.begin(parts, offset, max(positions))
        with by_groups() if self._layers else nullcontext():
            logits = self._model.decode([seq for seq, _ in fed], positions, tokens, self._caches)
        for group, num in own:
            group.grow(num)
        return logits

    def guess(self, blocks: Rows[Rows[int]]) -> mx.array | None:
        """Let the MTP head guess the drafts of the rows whose block has BY_HEAD in their place: lazy `(rows, drafts)`.

        Rows that need less take the first ones. What the head computes from guesses does not stay in its layers.
        Returns None if no block has any.
        """
        rows = [row for row, block in enumerate(blocks) if BY_HEAD in block]
        if not rows:
            return None
        index, num_layers = mx.array(rows), self._model.num_head_layers
        seqs = [self.seqs[row] for row in rows]
        groups = [next(group for group in self.groups if group.seqs[0] is seq) for seq in seqs]
        grouped = [GroupedLayer(caches) for caches in zip(*(group.kv[-num_layers:] for group in groups), strict=True)]
        last = self._states[-1].cache[0]
        hidden = None if last is None else last[index]
        tokens, guesses = mx.array([blocks[row][0] for row in rows]), []
        sampler, alike = self._get_sampler([0] * len(self.seqs)), [1] * len(rows)
        for place in range(max(block.count(BY_HEAD) for block in blocks)):
            positions = [group.lengths[0] + place for group in groups]
            for layer in grouped:
                layer.begin(spans(alike, alike), mx.array(positions), max(positions))
            with by_groups():
                logits, hidden = self._model.guess(seqs, positions, tokens, hidden, list(grouped))
            tokens = sampler.guess(logits, rows, place)
            guesses.append(tokens)
        for group in groups:
            layers.take_back(group.kv[-num_layers:], len(guesses))
        return mx.stack(guesses, axis=1)

    def feed_blocks(self, blocks: Rows[Rows[int]], guessed: mx.array | None = None) -> mx.array:
        """Feed each row its own known tokens, at least one -> lazy `logits: (all tokens, vocab)`, row after row.

        Only rows that are alone in their group may have several. `guessed`: the result of `guess` for these blocks.
        `settle` follows.
        """
        counts = [len(block) for block in blocks]
        own = [counts[self.seqs.index(group.seqs[0])] for group in self.groups]
        width = max(counts)
        if width == 1 or (len(self.groups) > 1 and not self._states):
            return self.feed(mx.array([token for block in blocks for token in block]), own)
        lengths = [length for group in self.groups for length in group.lengths]
        for state in self._states:
            state.start_speculation(width)
        padded = mx.array([[*block, *[0] * (width - len(block))] for block in blocks])
        if guessed is not None:
            rows = mx.array([row for row, block in enumerate(blocks) if BY_HEAD in block])
            padded[rows, 1 : 1 + guessed.shape[1]] = guessed
        if not self._caches:
            self._assemble()
        if self._layers:  # the caches of a single row take a block as they take a chunk of a prompt
            offset, parts = mx.array(lengths), block_spans([len(group.seqs) for group in self.groups], own, width)
            for layer in self._layers:
                layer.begin(parts, offset, max(lengths), width)
        with by_groups() if self._layers else nullcontext():
            logits = self._model.extend(self.seqs, lengths, padded, self._caches)
        for group, count in zip(self.groups, own, strict=True):
            group.grow(count)
        return mx.concatenate([logits[row, :count] for row, count in enumerate(counts)])

    def settle(self, blocks: Rows[Rows[int]], kept: Rows[int], tokens: Rows[int]) -> None:
        """Keep the first `kept[r]` tokens of the block that `feed_blocks` fed to row r, and feed `tokens[r]` next."""
        if self._sampler is not None:
            self._sampler.keep(blocks, kept)
        row = 0
        for group in self.groups:
            if rejected := len(blocks[row]) - kept[row]:
                layers.take_back(group.kv, rejected)
                group.grow(-rejected)
            row += len(group.seqs)
        if max(map(len, blocks)) > 1:
            for state in self._states:
                state.commit_speculation(list(kept))
        self._tokens = mx.array(list(tokens))

    def draw_blocks(self, logits: mx.array, blocks: Rows[Rows[int]], words: Words | None) -> InFlight:
        """Start the sampling behind each token of `feed_blocks`. `words: (all tokens, words)`."""
        sampled = self._get_sampler([len(block) for block in blocks]).sample_blocks(logits, blocks, words)
        mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
        return InFlight(
            [seq for seq, block in zip(self.seqs, blocks, strict=True) for _ in block], sampled, self._model.vocab_size
        )

    def _get_sampler(self, num_fed: Rows[int]) -> Sampler:
        """Return the sampler of these rows, with the number of tokens that the last forward pass has fed to each."""
        if self._sampler is None:
            lengths = [length for group in self.groups for length in group.lengths]
            ends = [length - num for length, num in zip(lengths, num_fed, strict=True)]
            self._sampler = Sampler(self.seqs, self._model.vocab_size, ends)
        return self._sampler

    def let_go(self) -> None:
        """Leave the caches to the groups alone, so that a merge can free each layer once it is copied."""
        self._layers, self._caches = [], []

    def _assemble(self) -> None:
        if len(self.seqs) > 1 and (len(self.groups) > 1 or self._model.no_shared_forward is None):
            self._layers = [GroupedLayer(caches) for caches in zip(*(group.kv for group in self.groups), strict=True)]
        self._caches = layers.assemble(self._structure, self._layers or self.groups[0].kv, self._states)

    def take_out(self, seq_id: int) -> OwnRow | None:
        """Take the KV of a row out of its group, after which the batch cannot run. None if the group has other rows."""
        group = next(group for group in self.groups if seq_id in group.seq_ids)
        if len(group.seqs) > 1:
            return None
        self.let_go()
        kv, group.kv = group.kv, []
        return kv, self._states, self.seq_ids.index(seq_id)

    def view(self, seq_id: int, length: int) -> snapshot.RowView:
        """View the state of one row, of `length` tokens."""
        group = next(group for group in self.groups if seq_id in group.seq_ids)
        row, state_row = group.seq_ids.index(seq_id), self.seq_ids.index(seq_id)
        return snapshot.view(group.kv, row, self._states, state_row, length)
