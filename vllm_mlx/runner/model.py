"""Loads a model, and runs it: tokens and caches in, logits out. mlx-lm runs text, mlx-vlm also images."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache import layers, snapshot, whole
from ..cache.footprint import footprint
from ..cache.layers import LayerCaches
from ..cache.media import MediaCache
from ..core.memory import ALLOCATION_STEP
from ..core.sequence import MediaItem, Sequence
from .libraries import make_prompt_cache
from .model_types import TypeFacts, facts_of
from .vision_inputs import Features, ImageMask, chunk_positions, encode, text_delta

logger = logging.getLogger(__name__)
_NUM_CHECKED = 8  # tokens of the look at a loaded model's logits


class Model(ABC):
    """A loaded checkpoint. It keeps no state of any request."""

    num_head_layers = 0  # of an MTP head: their caches follow the model's own, and then its last hidden state does
    head_digest = ""  # of a head that does not come with the checkpoint
    no_head: str | None = None  # why the checkpoint's MTP head is not used; None if it is, or if there is none
    proves_chunks = False  # a load compares the logits of a prompt in chunks with those of the whole
    no_chunks: str | None = None  # why every prompt is computed whole; None if chunks are right

    def __init__(self, module: Any, whole_sizes: dict[int, int] | None = None):
        """`whole_sizes` are those of another load."""
        self.module = module
        self.structure = self.new_caches()  # the caches that layers have; these stay empty
        caches = self.new_caches()
        # Only shapes are needed of this pass. Nothing of it is computed, so that no weights are read.
        self.vocab_size = int(self.forward(mx.array([[0]]), caches).shape[-1])  # width of the logits
        self.whole_sizes = whole_sizes or self._whole_sizes()
        self.footprint = footprint(caches, self.whole_sizes)
        self.can_batch = layers.can_batch(caches)
        self.no_shared_forward: str | None = None  # why groups cannot share a forward pass; None if they can
        self.no_drafts: str | None = None  # why no drafts can be verified; None if they can
        self.resume_rule = snapshot.resume_rule(caches)
        self.no_prefix_cache = snapshot.copy_fault(caches)  # why nothing is cached; None if prefixes are
        self.is_recurrent = any(layers.is_recurrent(leaf) for leaf in layers.leaves(caches))
        # classes of the layers whose state is copied whole, at resume points only
        self.copied_whole = tuple(sorted({type(leaf).__name__ for leaf in layers.copied_whole(self.structure)}))

    def check_logits(self) -> None:
        """Compute a few tokens. Raise ValueError if their logits are not numbers, or all alike: weights are damaged."""
        tokens = mx.arange(1, 2 * _NUM_CHECKED, 2) * self.vocab_size // (2 * _NUM_CHECKED)
        logits = self.forward(tokens[None], self.new_caches()).astype(mx.float32)
        are_numbers = mx.isfinite(mx.logsumexp(logits, axis=-1)).all()  # a model may set single ones to minus infinity
        differ = (logits.max(axis=-1) > logits.min(axis=-1)).any()
        is_sound = are_numbers & differ
        mx.eval(is_sound)
        mx.synchronize()  # a device fault is raised here, and is not taken for damage
        if not is_sound.item():
            raise ValueError("its weights are damaged, since its logits are not numbers, or all alike")

    def probe(self, num_tokens: int) -> None:
        """Compute a chunk, and wait for it."""
        caches = self.new_caches()
        self.forward(mx.array([[0] * num_tokens]), caches)
        mx.eval(layers.state_arrays(caches))

    @property
    def weights(self) -> list[Any]:
        """Return the modules that hold weights."""
        return [self.module]

    @property
    def window(self) -> int | None:
        """Return the window of sliding-window layers in tokens. None if the model has no such layers."""
        return None if self.resume_rule is None else self.resume_rule.window

    def agree(self, likeness: float, error: Exception | None) -> float:
        """Return the likeness by which all ranks of a model decide. They also have all met an error, or none."""
        return likeness

    def refuse_prefix_cache(self, reason: str) -> None:
        """Cache no prefix of this model."""
        self.resume_rule, self.no_prefix_cache = None, reason

    def _whole_sizes(self) -> dict[int, int] | None:
        """Return bytes of the layers that are copied whole, for rows of two lengths. None without such layers."""
        if not layers.copied_whole(self.structure):
            return None
        caches, sizes = self.new_caches(), {}
        for num_tokens in (ALLOCATION_STEP, 2 * ALLOCATION_STEP):
            mx.eval(self.forward(mx.array([[0] * ALLOCATION_STEP]), caches), layers.state_arrays(caches))
            sizes[num_tokens] = layers.state_bytes(layers.copied_whole(caches))
        return sizes

    @property
    def media(self) -> MediaCache[Features] | None:
        """Return the cache of image features. None for a model that takes no images."""
        return None

    @abstractmethod
    def new_caches(self) -> LayerCaches: ...

    @abstractmethod
    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Run text from the caches' end: `tokens: (rows, n)` -> lazy `logits: (rows, n, vocab)`. Caches grow by n."""

    @abstractmethod
    def encode(self, seq: Sequence, start: int, end: int) -> None:
        """Run the vision encoder for images in `[start, end)` whose features are not cached, and wait for it."""

    @abstractmethod
    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        """Run positions `[start, end)` of one row -> lazy `logits: (1, n, vocab)`, computed only if they are read.

        The caches then hold `end` tokens.
        """

    def decode(self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Feed `tokens: (n,)` -> lazy `logits: (n, vocab)`. `seqs` and `positions` have an entry for each token."""
        return self.extend(seqs, positions, tokens[:, None], caches)[:, -1]

    @abstractmethod
    def extend(self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Feed text of several rows, `tokens: (rows, n)` -> lazy `logits: (rows, n, vocab)`.

        `seqs` and `positions` have an entry for each row: its sequence, and the position of its first token.
        """

    def guess(
        self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, hidden: mx.array | None, caches: LayerCaches
    ) -> tuple[mx.array, mx.array]:
        """Let the MTP head guess the tokens after `tokens: (rows,)` at these positions -> lazy `logits: (rows, vocab)`.

        `hidden` are the hidden states before the tokens, `(rows, 1, width)`; None at the start of a text. Returns those
        behind them. `caches` are those of the head's layers, which grow by one token.
        """
        raise NotImplementedError("the model has no MTP head")


class TextModel(Model):
    """An mlx-lm checkpoint."""

    def __init__(self, module: Any, whole_sizes: dict[int, int] | None = None):
        super().__init__(module, whole_sizes)
        if facts_of(getattr(module, "model_type", None)).no_batch_in == "mlx-lm":
            self.can_batch = False

    def new_caches(self) -> LayerCaches:
        return list(make_prompt_cache(self.module))

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        logits: mx.array = self.module(tokens, cache=caches)
        return logits

    def encode(self, seq: Sequence, start: int, end: int) -> None:
        """Do nothing: this model takes no images."""

    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        return self.forward(mx.array([seq.tokens(start, end)]), caches)

    def extend(self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, caches: LayerCaches) -> mx.array:
        return self.forward(tokens, caches)


class MultimodalModel(Model):
    """An mlx-vlm checkpoint, whose language model is given every row's positions and features.

    Text alone and text with images take the same path. Without positions, mlx-vlm would reuse those of the last call,
    which it keeps. So every call passes positions, if the family places images in a grid.
    """

    def __init__(self, module: Any, whole_sizes: dict[int, int] | None = None):
        self._language = _language_model(module.language_model)
        self.has_grid = hasattr(self._language, "get_rope_index") and not _text_facts(self._language).no_grid
        self._cache: MediaCache[Features] = MediaCache(0)  # the scheduler sets its size
        super().__init__(module, whole_sizes)
        if _text_facts(module.language_model).no_batch_in == "mlx-vlm":
            self.can_batch = False

    @property
    def media(self) -> MediaCache[Features]:
        return self._cache

    @property
    def bidirectional_images(self) -> bool:
        """Return whether the tokens of an image attend to each other, so that no chunk may end inside an image."""
        text = getattr(self.module.config, "text_config", None)
        return getattr(text, "use_bidirectional_attention", None) == "vision"

    def forget_images(self, then: MediaCache[Features] | None = None) -> None:
        """Drop all features and counts. `then` is the cache that the model uses from now on, instead of a new one."""
        self._cache = MediaCache(0) if then is None else then

    def new_caches(self) -> LayerCaches:
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._language))

    def forward(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        rows, num_tokens = tokens.shape
        return self._run(tokens, caches, mx.tile(mx.arange(num_tokens), (3, rows, 1)))

    def encode(self, seq: Sequence, start: int, end: int) -> None:
        for item in _between(seq, start, end):
            self._features(seq, item)

    def prefill(self, seq: Sequence, start: int, end: int, caches: LayerCaches) -> mx.array:
        tokens = mx.array([seq.tokens(start, end)])
        positions = mx.array(chunk_positions(self.items_in_grid(seq), start, end)[:, None])
        items = _between(seq, start, end)
        if not items:
            return self._run(tokens, caches, positions)
        if self.bidirectional_images:
            spans = [(item.offset, item.end) for item in items]
            caches = [ImageMask(cache, spans, start) for cache in caches]
        return self._run(tokens, caches, positions, **self.chunk_inputs(seq, items, tokens, start))

    def extend(self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, caches: LayerCaches) -> mx.array:
        return self._run(tokens, caches, self.in_grid(seqs, positions, tokens.shape[1]))

    def in_grid(self, seqs: Rows[Sequence], positions: Rows[int], num_tokens: int) -> mx.array:
        """Return the positions of each row's next tokens of text, from its own position on: `(3, rows, num_tokens)`."""
        starts = [text_delta(self.items_in_grid(seq)) + position for seq, position in zip(seqs, positions, strict=True)]
        return mx.array([[[*range(start, start + num_tokens)] for start in starts]] * 3)

    def chunk_inputs(self, seq: Sequence, items: Rows[MediaItem], tokens: mx.array, start: int) -> dict[str, Any]:
        """Return the inputs of text with `items`, except ids and positions. `tokens: (1, n)` start at `start`."""
        merged = self.module.get_input_embeddings(tokens).to_dict()
        embeddings, position, cuts = merged["inputs_embeds"][0], 0, []
        parts = []
        seen = np.zeros(tokens.shape, dtype=bool)
        for item in items:
            low, high = max(item.offset - start, 0), min(item.end - start, tokens.shape[1])
            cut = self._features(seq, item).cut(low + start - item.offset, high + start - item.offset)
            parts += [embeddings[position:low], cut.embeddings.astype(embeddings.dtype)]
            cuts.append(cut)
            seen[0, low:high] = True
            position = high
        inputs: dict[str, Any] = {"inputs_embeds": mx.concatenate([*parts, embeddings[position:]])[None]}
        if merged["per_layer_inputs"] is not None:
            inputs["per_layer_inputs"] = merged["per_layer_inputs"]
        if cuts[0].deepstack:
            depths = range(len(cuts[0].deepstack))
            inputs["deepstack_visual_embeds"] = [mx.concatenate([cut.deepstack[d] for cut in cuts]) for d in depths]
            inputs["visual_pos_masks"] = mx.array(seen)
        return inputs

    def _features(self, seq: Sequence, item: MediaItem) -> Features:
        key = seq.media_key(item)
        features = self._cache.get(key)
        if features is None:
            start = time.perf_counter()
            features = encode(self.module, seq.tokens(item.offset, item.end), item)
            self._cache.store(key, features, seconds=time.perf_counter() - start)
            if not isinstance(item.inputs, Mapping):
                item.inputs.drop()
        return features

    def items_in_grid(self, seq: Sequence) -> list[MediaItem]:
        """Return the row's media that form grids. A family without grids has none."""
        return [item for item in seq.prompt.media if item.layout is not None] if self.has_grid else []

    def _run(self, tokens: mx.array, caches: LayerCaches, positions: mx.array, **inputs: Any) -> mx.array:
        """`positions: (3, rows, n)`; families without grids compute their own."""
        if self.has_grid:
            inputs["position_ids"] = positions
        logits: mx.array = self._language(tokens, cache=caches, **inputs).logits
        return logits


def _language_model(language: Any) -> Any:
    """Return the language model that runs: mlx-vlm's, or mlx-lm's on the same weights."""
    is_scaled = _text_facts(language).text_by_mlx_lm and not language.config.use_qk_norm
    return _Ministral3(language) if is_scaled else language


def _text_facts(language: Any) -> TypeFacts:
    """Return the facts about the type of a language model. Not every family keeps its type."""
    types = [getattr(part, "model_type", None) for part in (getattr(language, "config", None), language)]
    return facts_of(types[0] or types[1])


class _Ministral3:
    """mlx-lm's model of Ministral 3, on the weights of mlx-vlm's.

    mlx-vlm's model scales the attention of a batch by the position of its first row, and waits for that number in each
    step (mlx_vlm/models/mistral3/language.py). mlx-lm's model scales each row by its own position.
    """

    def __init__(self, language: Any):
        from mlx_lm.models import ministral3

        self.make_cache = language.make_cache
        self._model = ministral3.Model(ministral3.ModelArgs.from_dict(vars(language.config)))
        self._model.update_modules(language.leaf_modules())

    def __call__(self, tokens: mx.array, *, cache: LayerCaches, inputs_embeds: mx.array | None = None) -> Any:
        from mlx_vlm.models.base import LanguageModelOutput

        return LanguageModelOutput(logits=self._model(tokens, cache=cache, input_embeddings=inputs_embeds))


def _between(seq: Sequence, start: int, end: int) -> list[MediaItem]:
    return [item for item in seq.prompt.media if item.offset < end and item.end > start]


def weight_arrays(model: Any) -> list[mx.array]:
    """Return all arrays of the model, each once: parameters, and constants that MLX hides, as rotary frequencies."""
    return whole.arrays(model, _is_code)


def _is_code(value: Any) -> bool:
    return isinstance(value, (type, FunctionType, ModuleType))


def weights_bytes(model: Any) -> int:
    return sum(array.nbytes for array in weight_arrays(model))
