"""The checkpoint's processor, from the library: text and pixels → token ids and arrays. Knows no conversation."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..core.errors import ModelLoadError, first_line, setting
from ..tokens.remote_code import RemoteCodeRefused, remote_code
from ..tokens.tokenizer import Tokenizer

# Options for token ids without special tokens: most processors take the first.
WAYS: tuple[Mapping[str, Any], ...] = (MappingProxyType({"add_special_tokens": False}), MappingProxyType({}))
# What a processor raises on pixels that it cannot take.
REFUSALS = (ValueError, TypeError, ZeroDivisionError, IndexError, OSError)
# What a processor raises on kinds of media or texts that it was not written for.
FAULTS = (*REFUSALS, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError, RuntimeError)
MAX_REASON = 200  # characters of a library's message
_NOT_ENCODER_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ModelProcessor:
    """Not safe to share between threads."""

    def __init__(self, processor: Any, tokenizer: Tokenizer, options: Mapping[str, Any]):
        """`options`: one of `WAYS`."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._options = options
        self.settings = _settings(processor)

    @property
    def video_processor(self) -> Any:
        """None if it takes no videos."""
        return getattr(self._processor, "video_processor", None)

    def takes(self, name: str) -> bool:
        """Whether the processor has a parameter of this name."""
        return name in inspect.signature(self._processor.__call__).parameters

    def run(self, text: str, *, keep_all: bool = False, **media: Any) -> tuple[list[int], dict[str, np.ndarray]]:
        """Token ids of the text, and encoder inputs of its `media`: `images`, or `videos` with their metadata.

        `keep_all`: also return arrays that describe token ids.
        """
        outputs = dict(self._processor(text=[text], **media, **self._options))
        if "images" in outputs:  # the name in some families
            outputs["pixel_values"] = outputs.pop("images")
        ids = [int(token_id) for token_id in np.array(outputs["input_ids"]).reshape(-1)]
        begin = self._tokenizer.encode("", add_special_tokens=True)
        if not self._options and begin and ids[: len(begin)] == begin:
            ids = ids[len(begin) :]  # the chat template writes the first token itself
        left_out = {"input_ids", "attention_mask"} if keep_all else _NOT_ENCODER_INPUTS
        arrays = {name: _array(value) for name, value in outputs.items() if name not in left_out}
        return ids, {name: array for name, array in arrays.items() if array is not None}


def load_library_processor(path: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """Raises ModelLoadError if it cannot be loaded from the checkpoint's files."""
    from mlx_vlm.utils import get_model_and_args, load_processor

    get_model_and_args(dict(config))  # registers the family's own processor
    try:
        with remote_code(path, "processor", trusted=trust_remote_code):
            return load_processor(path, add_detokenizer=False, trust_remote_code=trust_remote_code)
    except RemoteCodeRefused:
        raise
    except Exception as error:  # a processor is code of the library, the checkpoint's files its input
        raise unusable(path, f"its processor cannot be loaded: {first_line(error, MAX_REASON)}") from error


def unusable(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is a vision checkpoint, but images cannot be served: {reason}. "
        f"Complete the checkpoint, or serve it with {setting('text_only')}."
    )


def _array(value: Any) -> np.ndarray | None:
    """A numpy array, made in the thread that made the value: lazy MLX arrays belong to it. None if it is no array."""
    if value is None or isinstance(value, str):
        return None
    array = np.array(value)
    return None if array.dtype == object else array


def _settings(processor: Any) -> bytes:
    parts = [getattr(processor, "image_processor", processor), getattr(processor, "video_processor", None)]
    values = [
        {name: value for name, value in vars(part).items() if not name.startswith("_")}
        for part in parts
        if part is not None
    ]
    return json.dumps(values, sort_keys=True, default=repr).encode()
