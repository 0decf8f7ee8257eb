"""How a command ends that could not do its work: one sentence and an exit code. Prints nothing."""

from ..core.errors import VLLMMLXError


class CommandFailed(VLLMMLXError):
    """It was asked for well, and did not work."""

    exit_code = 1


class WrongUsage(CommandFailed):
    """What was asked for makes no sense."""

    exit_code = 2
