"""Every cache class of mlx-lm and mlx-vlm is one that `docs/models.md` speaks of."""

import re
from pathlib import Path

import mlx_lm
import mlx_vlm
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SOURCES = {"mlx_lm": Path(mlx_lm.__path__[0]), "mlx_vlm": Path(mlx_vlm.__path__[0])}
NO_STATE_OF_A_ROW = {
    "_BaseCache", "LRUPromptCache",
    "AudioConvCache",
    "Flux2KVCache", "Flux2KVLayerCache", "QwenImageKVCache", "QwenImageKVLayerCache", "MiniMaxH3AdaLNCache",
    "VisionFeatureCache",
}  # fmt: skip


@pytest.mark.parametrize("library", SOURCES)
def test_the_page_names_every_class(library: str) -> None:
    made = {
        name
        for file in SOURCES[library].rglob("*.py")
        for name in re.findall(r"^class (\w+Cache)\b", file.read_text(), re.MULTILINE)
    }
    text = PAGE.read_text()
    unknown = {name for name in made - NO_STATE_OF_A_ROW if f"`{name}`" not in text and "Batch" not in name}
    assert len(made) > 8 and not unknown
