"""The checkpoint's own processor, which is the library's: text and pixels → ids and tensors. Knows no conversation."""

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

# How it may be asked for ids: most take the first.
WAYS: tuple[Mapping[str, Any], ...] = (MappingProxyType({"add_special_tokens": False}), MappingProxyType({}))
# What a processor raises on pixels that it cannot take.
REFUSALS = (ValueError, TypeError, ZeroDivisionError, IndexError, OSError)
# And what on media or texts of a kind that it was not made for.
FAULTS = (*REFUSALS, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError, RuntimeError)
MAX_REASON = 200  # characters of what a library says
_NOT_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ModelProcessor:
    """Not made for several threads."""

    def __init__(self, processor: Any, tokenizer: Tokenizer, options: Mapping[str, Any]):
        """`options`: one of `WAYS`."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._options = options
        self.settings = _settings(processor)

    @property
    def video_processor(self) -> Any:
        """None where it takes no videos."""
        return getattr(self._processor, "video_processor", None)

    def takes(self, name: str) -> bool:
        """Whether `run` may be given something of that name."""
        return name in inspect.signature(self._processor.__call__).parameters

    def run(self, text: str, *, keep_all: bool = False, **shown: Any) -> tuple[list[int], dict[str, np.ndarray]]:
        """Ids of the text, and tensors of what is shown in it: `images`, or `videos` with what they take besides.

        `keep_all`: also tensors that stand for ids.
        """
        outputs = dict(self._processor(text=[text], **shown, **self._options))
        if "images" in outputs:  # some families' name for it
            outputs["pixel_values"] = outputs.pop("images")
        ids = [int(token_id) for token_id in np.array(outputs["input_ids"]).reshape(-1)]
        begin = self._tokenizer.encode("", add_special_tokens=True)
        if not self._options and begin and ids[: len(begin)] == begin:
            ids = ids[len(begin) :]  # the chat template writes them
        left_out = {"input_ids", "attention_mask"} if keep_all else _NOT_TENSORS
        tensors = {name: _tensor(value) for name, value in outputs.items() if name not in left_out}
        return ids, {name: tensor for name, tensor in tensors.items() if tensor is not None}


def load_library_processor(path: Path, config: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """Raises ModelLoadError where the checkpoint's files make none."""
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


def _tensor(value: Any) -> np.ndarray | None:
    """Numpy, made in the thread that made the value: a lazy array of MLX belongs to it. None for what is no array."""
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
