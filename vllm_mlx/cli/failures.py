"""How a command ends: the exit codes, and the errors that choose one. Prints nothing."""

from enum import IntEnum

from ..core.errors import VLLMMLXError


class ExitCode(IntEnum):
    """What a command tells the shell or the supervisor that started it."""

    DONE = 0
    FAILED = 1  # exit code of `serve`: a setting, file or machine that cannot serve; a restart would fail again
    USAGE = 2  # the command line is wrong
    RESTART = 75  # EX_TEMPFAIL of sysexits.h: `serve` broke down and can be started again
    INTERRUPTED = 130  # Ctrl-C, as shells count it


class CommandFailed(VLLMMLXError):
    """It was asked for well, and did not work."""

    exit_code = ExitCode.FAILED


class WrongUsage(CommandFailed):
    """What was asked for makes no sense."""

    exit_code = ExitCode.USAGE


class BrokeDown(CommandFailed):
    """A server that worked, or could have, ended by an error of its own."""

    exit_code = ExitCode.RESTART


def exit_code_of(error: VLLMMLXError) -> ExitCode:
    return error.exit_code if isinstance(error, CommandFailed) else ExitCode.FAILED
