"""What a checkpoint's own processor makes of one picture: placeholders and tensors. Knows no conversation."""

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from ..core.errors import InvalidParameter, ModelLoadError
from ..core.sequence import MediaItem, PromptInputs
from .images.picture import Picture
from .tokenizer import Tokenizer

_DIGEST_BYTES = 16
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id")  # names in config.json
_MARKERS = ("image_token", "boi_token")  # names of a processor's attributes
_NO_SPECIAL_TOKENS: Mapping[str, Any] = MappingProxyType({"add_special_tokens": False})  # not all processors take it
_MIDDLE_PIXELS = 512 * 512  # of the larger image that a tower is measured with
_NOT_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True, eq=False)
class Rendition:
    """A picture as the model is shown it."""

    text: str  # stands for it in a rendered conversation
    num_lead_chars: int  # of the text, before the placeholders
    token_ids: tuple[int, ...]  # the placeholders: from the first to the last image token
    digest: bytes  # of tensors, placeholders and the processor's settings
    inputs: Mapping[str, np.ndarray]
    grid: tuple[int, int, int] | None = None  # (t, h, w) in tokens, where the family lays images out

    def placed(self, offset: int) -> MediaItem:
        return MediaItem(self.digest, offset, len(self.token_ids), self.inputs, self.grid)

    def alone(self) -> PromptInputs:
        return PromptInputs(token_ids=self.token_ids, media=(self.placed(0),))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class VisionProbe:
    """What a loaded model is tried with."""

    prompt: PromptInputs  # with two images, each made by itself
    inputs: Mapping[str, np.ndarray]  # tensors that the processor makes of both at once
    sizes: tuple[PromptInputs, PromptInputs]  # a small and a larger image, each alone
    max_image_tokens: int  # of one image


class VisionProcessor:
    """Safe to share between threads. Pictures shown lately are kept with their tensors, up to `keep_bytes`."""

    def __init__(
        self,
        path: Path,
        processor: Any,
        tokenizer: Tokenizer,
        *,
        image_token_id: int,
        marker: str,
        merge_size: int = 1,
        max_pixels: int,
        options: Mapping[str, Any] = _NO_SPECIAL_TOKENS,
    ):
        """`merge_size`: patches a side that become one token, where the processor tells of a grid of patches."""
        self.marker = marker  # what a chat template writes for an image
        self._path = path
        self._processor = processor
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._merge_size = merge_size
        self._max_pixels = max_pixels
        self._options = options
        self._settings = _settings(processor)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, int | None], Rendition] = OrderedDict()
        self._kept_bytes = 0
        self.keep_bytes = 0

    @classmethod
    def load(
        cls,
        path: Path,
        config: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        max_pixels: int,
        trust_remote_code: bool = False,
    ) -> "VisionProcessor":
        """Raises ModelLoadError where the checkpoint's images cannot be shown to it."""
        from mlx_vlm.utils import get_model_and_args, load_processor

        get_model_and_args(dict(config))  # registers the family's own processor
        try:
            processor = load_processor(path, add_detokenizer=False, trust_remote_code=trust_remote_code)
        except Exception as error:  # a processor is code of the library, the checkpoint's files its input
            raise _unusable(path, f"its processor cannot be loaded: {_first_line(error)}") from error
        image_token_id = next((config[name] for name in _IMAGE_TOKENS if isinstance(config.get(name), int)), None)
        if image_token_id is None:
            raise _unusable(path, f"config.json names no {_IMAGE_TOKENS[0]}")
        merge_size = int(config["vision_config"].get("spatial_merge_size") or 1)
        markers = [str(getattr(processor, name)) for name in _MARKERS if getattr(processor, name, None)]
        for marker, options in itertools.product(markers, (_NO_SPECIAL_TOKENS, {})):
            found = cls(
                path,
                processor,
                tokenizer,
                image_token_id=image_token_id,
                marker=marker,
                merge_size=merge_size,
                max_pixels=max_pixels,
                options=options,
            )
            if found._works():
                return found
        raise _unusable(path, "its processor does not write one image at a time")

    def show(self, picture: Picture, max_side: int | None = None) -> Rendition:
        """`max_side`: of the picture as shown, in pixels. Raises InvalidParameter where the processor refuses it."""
        key = picture.digest, max_side
        with self._lock:  # processors and their tokenizers are not made for several threads
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            try:
                rendition = self._render(picture, max_side)
            except (ValueError, TypeError, ZeroDivisionError, IndexError, OSError) as error:
                size = f"{picture.width} x {picture.height}"
                raise InvalidParameter(
                    f"The model's processor cannot take this image of {size} pixels: {_first_line(error)}",
                    param="messages",
                ) from error
            self._keep(key, rendition)
            return rendition

    def probe(self) -> VisionProbe:
        """Raises ModelLoadError where the chat template does not show images."""
        pictures = [_sample(seed) for seed in (1, 2)]
        text = self._probe_text()
        with self._lock:
            ids, inputs = self._process(text, [self._fit(picture) for picture in pictures], keep_all=True)
            renditions = [self._render(picture) for picture in pictures]
            middle = self._render(_plain(min(self._max_pixels, _MIDDLE_PIXELS)))
            largest = self._render(_plain(self._max_pixels))
        items, position = [], 0
        for rendition in renditions:
            position = ids.index(self._image_token_id, position)
            items.append(rendition.placed(position))
            position = items[-1].end
        prompt = PromptInputs(token_ids=tuple(ids), media=tuple(items))
        sizes = (renditions[0].alone(), middle.alone())
        return VisionProbe(prompt, inputs, sizes, len(largest.token_ids))

    def _probe_text(self) -> str:
        image = {"type": "image"}
        content = [{"type": "text", "text": "one"}, image, {"type": "text", "text": "two"}, image]
        messages = [{"role": "user", "content": content}]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        except Exception as error:  # a template is a program
            raise _unusable(self._path, f"its chat template fails on one: {_first_line(error)}") from error
        if text.count(self.marker) != 2:
            raise _unusable(self._path, f"its chat template shows no {self.marker} for one")
        return text

    def _works(self) -> bool:
        """Whether the text of a picture says its very placeholders again."""
        try:
            rendition = self._render(_sample(0))
        except Exception:  # a marker that is none ends in any error
            return False
        return rendition.token_ids.count(self._image_token_id) > 1 and bool(rendition.inputs)

    def _render(self, picture: Picture, max_side: int | None = None) -> Rendition:
        ids, inputs = self._process(self.marker, [self._fit(picture, max_side)])
        text = self._tokenizer.decode(ids)
        if self._tokenizer.encode(text, add_special_tokens=False) != ids:
            raise ValueError("its placeholders have no text")
        start = ids.index(self._image_token_id)
        end = len(ids) - ids[::-1].index(self._image_token_id)
        digest = blake2b(self._settings + repr(ids).encode(), digest_size=_DIGEST_BYTES)
        for name, array in sorted(inputs.items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        lead = len(self._tokenizer.decode(ids[:start])) if start else 0
        return Rendition(text, lead, tuple(ids[start:end]), digest.digest(), inputs, self._grid(inputs))

    def _grid(self, inputs: Mapping[str, np.ndarray]) -> tuple[int, int, int] | None:
        patches = inputs.get("image_grid_thw")
        if patches is None:
            return None
        t, h, w = (int(size) for size in patches.reshape(-1))
        return t, h // self._merge_size, w // self._merge_size

    def _fit(self, picture: Picture, max_side: int | None = None) -> Image.Image:
        image = Image.fromarray(picture.pixels)
        scale = (self._max_pixels / (picture.width * picture.height)) ** 0.5
        if max_side is not None:
            scale = min(scale, max_side / max(picture.width, picture.height))
        if scale >= 1:
            return image
        size = (max(1, int(picture.width * scale)), max(1, int(picture.height * scale)))
        return image.resize(size, Image.Resampling.BICUBIC)

    def _process(
        self, text: str, images: list[Image.Image], *, keep_all: bool = False
    ) -> tuple[list[int], dict[str, np.ndarray]]:
        outputs = dict(self._processor(text=[text], images=images, **self._options))
        if "images" in outputs:  # some families' name for it
            outputs["pixel_values"] = outputs.pop("images")
        ids = [int(token_id) for token_id in np.array(outputs["input_ids"]).reshape(-1)]
        begin = self._tokenizer.encode("", add_special_tokens=True)
        if not self._options and begin and ids[: len(begin)] == begin:
            ids = ids[len(begin) :]  # the chat template writes them
        left_out = {"input_ids", "attention_mask"} if keep_all else _NOT_TENSORS
        tensors = {name: _tensor(value) for name, value in outputs.items() if name not in left_out}
        return ids, {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _keep(self, key: tuple[bytes, int | None], rendition: Rendition) -> None:
        self._kept[key] = rendition
        self._kept_bytes += rendition.nbytes
        while self._kept and self._kept_bytes > self.keep_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes


def _sample(seed: int) -> Picture:
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (96, 160, 3)).astype(np.uint8))


def _plain(num_pixels: int) -> Picture:
    side = max(1, int(num_pixels**0.5))
    return Picture.of(np.zeros((side, side, 3), np.uint8))


def _tensor(value: Any) -> np.ndarray | None:
    """Numpy, made in the thread that made the value: a lazy array of MLX belongs to it. None for what is no array."""
    if value is None or isinstance(value, str):
        return None
    array = np.array(value)
    return None if array.dtype == object else array


def _settings(processor: Any) -> bytes:
    image_processor = getattr(processor, "image_processor", processor)
    values = {name: value for name, value in vars(image_processor).items() if not name.startswith("_")}
    return json.dumps(values, sort_keys=True, default=repr).encode()


def _unusable(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is a vision checkpoint, but images cannot be served: {reason}. "
        "Complete the checkpoint, or serve it with --text-only."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
