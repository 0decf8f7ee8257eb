"""Engines that answer by rote."""

import asyncio
from pathlib import Path

import pytest

from tests.prompt.template_variants import TEMPLATE_VARIANTS
from tests.support.rote import rote_checkpoint
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import open_disk, start_engine


@pytest.fixture
def engine_with(tmp_path: Path):
    """An engine that answers by rote, with one of the templates."""
    engines = []

    def start(
        architecture: str, variant: str, *, thought_tokens: int = 12, calls: bool = True, **settings
    ) -> EngineClient:
        opens = variant != "opens the thought"
        taught = {"thought_tokens": thought_tokens, "opens_thought": opens, "calls": calls}
        folder = tmp_path
        if not (folder / "config.json").exists():  # else the server starts again
            rote_checkpoint(folder, architecture, **taught)
        template = TEMPLATE_VARIANTS[variant]
        if architecture.startswith("gemma"):
            template = template.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
        formats = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "tool_grammar": "off"}
        settings = {**formats, **settings}
        config = EngineConfig(model=str(folder), memory_budget_bytes=4 << 30, chat_template=template, **settings)
        engines.append(start_engine(config, None if config.cache_dir is None else open_disk(config)))
        return engines[-1]

    yield start
    for engine in engines:
        asyncio.run(engine.shutdown(0))
