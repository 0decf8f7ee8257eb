"""Refuses settings that cannot work before a checkpoint is downloaded, or before its weights are loaded."""

from ..core.config import EngineConfig
from ..core.errors import ConfigError, setting
from ..formats.tokenizer import Tokenizer
from ..media.sources import MediaRoot
from ..prompt.reply_formats import check_parsers
from ..runner.checkpoint import Checkpoint
from ..runner.device import device_memory


def check_settings(config: EngineConfig) -> None:
    """Check what does not depend on the checkpoint. Raises ConfigError."""
    MediaRoot(config.media.media_root)
    check_parsers(config)
    machine_bytes = device_memory().total_bytes
    if config.memory_budget_bytes is not None and config.memory_budget_bytes > machine_bytes:
        raise ConfigError(
            f"{setting('memory_budget')} {config.memory_budget_bytes / 1e9:.1f} GB is more than this machine has, "
            f"{machine_bytes / 1e9:.1f} GB. Lower it."
        )


def checked_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. Raises ConfigError for settings that do not fit the checkpoint's small files."""
    declared, wanted = checkpoint.max_model_len, config.max_model_len
    if declared is not None and wanted is not None and wanted > declared:
        raise ConfigError(f"{setting('max_model_len')} {wanted} exceeds the checkpoint's context of {declared} tokens.")
    tokenizer = Tokenizer.load(
        checkpoint.path, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
    )
    if config.chat_template is not None and (fault := tokenizer.template_fault()) is not None:
        raise ConfigError(f"{setting('chat_template')} is not a Jinja template: {fault}.")
    return tokenizer
