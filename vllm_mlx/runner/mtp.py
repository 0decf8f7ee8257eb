"""A model with its MTP head, one more layer that guesses the token behind the next one (multi-token prediction).

Entry j of the head is made of the hidden state behind token j - 1 and of token j. Its output guesses token j + 1. Entry
0 has no hidden state before it, so a zero stands in. The head's KV and the last hidden state are state of every row as
that of all other layers is: each forward pass feeds them, drafted or not, and nothing else knows them.

Of mlx-vlm, this file uses how it reads a head's tensors, and the names of the head's layers.
"""

import logging
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.layers import LayerCaches
from ..core.errors import ModelLoadError, first_line, setting
from ..core.sequence import Sequence
from ..util.faults import device_fault
from .checkpoint import Checkpoint, find_checkpoint
from .grouped import held
from .load_model import LOAD_ERRORS
from .model import Model, MultimodalModel, weights_bytes
from .model_types import text_config
from .proofs import LIBRARY_ERRORS, Proofs, try_head
from .weight_files import readable

logger = logging.getLogger(__name__)

FAMILIES = ("qwen3_5", "qwen3_5_moe")
_SPLIT = "qwen3_5_mtp"  # the type of a head that was split off
_LAYERS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers", "norm")


class HeadedModel(MultimodalModel):
    """A hybrid model and its head."""

    def __init__(self, module: Any, head: Any, digest: str):
        self._head = head
        self._embed = module.language_model.model.embed_tokens
        self._to_logits = getattr(module.language_model, "lm_head", None) or self._embed.as_linear
        self.num_head_layers = len(head.layers)
        super().__init__(module)
        self.head_digest = digest

    @property
    def weights(self) -> list[Any]:
        return [self.module, self._head]

    def new_caches(self) -> LayerCaches:
        from mlx_vlm.models.cache import ArraysCache

        return [*super().new_caches(), *self._head.make_cache(), ArraysCache(1)]

    def guess(
        self, seqs: Rows[Sequence], positions: Rows[int], tokens: mx.array, hidden: mx.array | None, caches: LayerCaches
    ) -> tuple[mx.array, mx.array]:
        embedded = self._embed(tokens[:, None])
        before = mx.zeros_like(embedded) if hidden is None else hidden
        behind = self._run_head(embedded, before, caches, self.in_grid(seqs, positions, 1))
        return self._to_logits(behind)[:, -1], behind

    def _run(self, tokens: mx.array, caches: LayerCaches, positions: mx.array, **inputs: Any) -> mx.array:
        *layers, last = caches
        own, of_head = layers[: -self.num_head_layers], layers[-self.num_head_layers :]
        out = self._language(
            tokens, cache=own, position_ids=positions, return_hidden=True, capture_layer_ids=[], **inputs
        )
        hidden = out.hidden_states[-1]
        before = mx.zeros_like(hidden[:, :1]) if last[0] is None else last[0]
        source = mx.concatenate([before, hidden], axis=1)
        last.update_window(0, source, 1)  # recorded for a rollback, as other recurrent states are
        embedded = inputs.get("inputs_embeds")
        self._run_head(self._embed(tokens) if embedded is None else embedded, source[:, :-1], of_head, positions)
        # No logit needs the head's state, so without this nothing would compute it while no row drafts.
        logits: mx.array = mx.depends(out.logits, [last[0], *(array for cache in of_head for array in held(cache))])
        return logits

    def _run_head(self, embedded: mx.array, hidden: mx.array, caches: LayerCaches, at: mx.array) -> mx.array:
        """Run the pairs of embedded tokens and the hidden states before them: `(rows, n, width)` -> the same shape."""
        head = self._head
        pairs = mx.concatenate([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], axis=-1)
        x = head.fc(pairs)
        for layer, cache in zip(head.layers, caches, strict=True):
            mask = cache.make_mask(x.shape[1], return_array=False, window_size=None)
            x = layer(x, mask=mask, cache=cache, position_ids=at)
        behind: mx.array = head.norm(x)
        return behind


class HeadLoader:
    """Loads the MTP head that `draft_model` or the model's own checkpoint has, or says why none drafts."""

    def __init__(self, checkpoint: Checkpoint, draft_model: str | None, *, trust_remote_code: bool):
        """Raise ModelLoadError for a `draft_model` that cannot be used, if possible before weights are loaded."""
        self._draft_model, self._source = draft_model, checkpoint
        if draft_model is not None:
            try:
                self._source = find_checkpoint(draft_model, trust_remote_code=trust_remote_code)
            except ModelLoadError as error:
                raise _refused(draft_model, str(error)) from error
        self.digest = "" if draft_model is None else self._source.fingerprint()
        self._fault = _source_fault(checkpoint, self._source)
        if self._fault is not None and draft_model is not None:
            raise _refused(draft_model, self._fault)

    def load(self) -> Any:
        if self._fault is not None or not _has_head(self._source):
            return None
        try:
            return _load_head(self._source.path)
        except LOAD_ERRORS as error:
            if device_fault(error) is not None:
                raise
            self._fault = f"{self._source.path} cannot be loaded by mlx-vlm: {first_line(error, 300).rstrip('.')}."
            return None

    def join(self, model: Model, module: Any, proofs: Proofs | None) -> Model:
        if module is not None:
            found = _headed(model, module, self._source.path, self.digest, proofs)
            if isinstance(found, Model):
                return found
            self._fault = found
        if self._fault is not None:
            if self._draft_model is not None:
                raise _refused(self._draft_model, self._fault)
            logger.info("No MTP head drafts: %s", self._fault)
            model.no_head = self._fault
        return model


def _refused(draft_model: str | None, fault: str) -> ModelLoadError:
    return ModelLoadError(
        f"{setting('draft_model')} {draft_model} cannot be used: {fault} Without this setting, the model's own head "
        "drafts, if it has one."
    )


def _has_head(source: Checkpoint) -> bool:
    return source.architecture == _SPLIT or any(name.startswith("mtp.") for name in source.weight_names)


def _source_fault(checkpoint: Checkpoint, source: Checkpoint) -> str | None:
    """Return the reason why no head drafts for a checkpoint that names one, or for which `source` is to have one."""
    names_head = bool(text_config(checkpoint.config).get("mtp_num_hidden_layers"))
    if source is checkpoint and not (names_head or _has_head(source)):
        return None
    if checkpoint.architecture not in FAMILIES:
        return f"only heads of {' and '.join(FAMILIES)} draft, and not of {checkpoint.architecture}."
    if not _has_head(source):
        return f"{source.path} holds no mtp.* tensors. Use a conversion that keeps them."
    return None


def _headed(model: Model, head: Any, path: Path, digest: str, proofs: Proofs | None) -> Model | str:
    """Return the model with its head, which comes from `path`, or why that does not work."""
    if proofs is not None and proofs.no_head is not None:
        return proofs.no_head
    if not isinstance(model, MultimodalModel) or not model.is_recurrent:
        return "the model runs without mlx-vlm, or has no recurrent layers."
    width = model.module.config.text_config.hidden_size
    if any(not hasattr(head, name) for name in _LAYERS) or head.config.text_config.hidden_size != width:
        return f"{path} holds no head of a model that is {width} wide. Use one of this very model."
    try:
        headed = HeadedModel(model.module, head, digest)
        if proofs is None:
            try_head(headed)
    except LIBRARY_ERRORS as error:
        if device_fault(error) is not None:
            raise
        return f"the installed mlx-vlm runs it in another way ({type(error).__name__}: {first_line(error, 200)})."
    logger.info("The MTP head drafts; its weights take %.1f MB", weights_bytes(head) / 1e6)
    return headed


def _load_head(path: Path) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter

    with readable(path) as folder:
        return load_drafter(str(folder), "mtp", lazy=True)[0]
