"""Builds an engine client from a checkpoint: tokenizer, vision, engine thread and prompt threads."""

from dataclasses import replace

from ..core.config import EngineConfig
from ..media.loader import MediaLoader
from ..media.sources import MediaRoot
from ..media.vision import VisionProcessor
from ..prompt.processor import RequestProcessor
from ..runner.checkpoint import Checkpoint, find_checkpoint
from ..tokens.tokenizer import Tokenizer
from .client import EngineClient
from .engine import Engine
from .media_requests import MediaRequests
from .preparing import Preparations
from .prompt_pool import PromptPool
from .thread import EngineThread


def start_engine(config: EngineConfig) -> EngineClient:
    """Find the checkpoint, download it if necessary, and load it. Raises ConfigError."""
    checkpoint = find_checkpoint(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    return serve_checkpoint(config, checkpoint)


def serve_checkpoint(config: EngineConfig, checkpoint: Checkpoint) -> EngineClient:
    """Load everything, here and on the engine thread, and return when requests can come. Raises ConfigError."""
    media_root = MediaRoot(config.media.media_root)
    tokenizer = Tokenizer.load(
        checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
    )
    vision = load_vision(config, checkpoint, tokenizer)
    thread = _started_thread(config, checkpoint, vision)
    processor = RequestProcessor(
        tokenizer,
        config,
        checkpoint.path,
        max_model_len=thread.facts.info.max_model_len,
        vocab_size=thread.facts.info.vocab_size,
        vision=vision,
    )
    pool = PromptPool()
    media = _media_requests(config, processor, vision, media_root, pool, thread)
    preparations = Preparations(processor, media, pool, max_prepare_s=config.max_prepare_s)
    return EngineClient(config, processor, thread, pool, preparations)


def load_vision(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> VisionProcessor | None:
    """The checkpoint's image processor; None if it has no vision encoder or only text is served."""
    if config.text_only or not checkpoint.has_vision_encoder:
        return None
    return VisionProcessor.load(
        checkpoint.path,
        checkpoint.config,
        tokenizer,
        max_pixels=config.max_pixels,
        trust_remote_code=config.trust_remote_code,
    )


def _started_thread(config: EngineConfig, checkpoint: Checkpoint, vision: VisionProcessor | None) -> EngineThread:
    probe = None if vision is None else vision.probe()
    thread = EngineThread(lambda: Engine.load(config, checkpoint, probe))
    thread.start()
    if vision is not None:
        vision.set_memory(thread.facts.memory)
        if thread.facts.video_fault is not None:
            vision.refuse_videos(f"one was tried at load: {thread.facts.video_fault}")
    return thread


def _media_requests(
    config: EngineConfig,
    processor: RequestProcessor,
    vision: VisionProcessor | None,
    media_root: MediaRoot,
    pool: PromptPool,
    thread: EngineThread,
) -> MediaRequests | None:
    if vision is None:
        return None
    media = replace(config.media, media_cache_bytes=thread.facts.memory.decoded_bytes)
    loader = MediaLoader(media, media_root, sampling=vision.frame_sampling)
    return MediaRequests(processor, vision, loader, pool, thread.wake)
