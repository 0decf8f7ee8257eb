"""`vllm-mlx service`: a server that launchd or systemd starts at log-in, or with the machine, and again after a crash.

`service run` is the server's own process. The supervisors restart after a failure without knowing its cause, so this
process reports an end that a restart would not mend as a success, and keeps the reason for `service status`.
"""

import itertools
import json
import os
import pwd
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from pydantic import BaseModel, SecretStr

from ..core.config import ReasoningStrings
from ..core.errors import ConfigError, VLLMMLXError
from ..util.private_file import rights_of, write_private
from .options import SERVICE_FILE, SERVICE_KEYS, service_settings, takes_settings
from .output import LogFile, log_files, write_last
from .remote import NoServer, Remote
from .settings import OF_A_MODEL, Settings, local_url
from .supervisors import THROTTLE_S, Job, Supervisor, program_path, supervisor
from .terminal import BrokeDown, CommandFailed, ExitCode, exit_code_of, option, printable
from .worker import check_working, run_worker

MAX_SHORT_RUNS = 5
SHORT_RUN_S = 120.0
ROOM_S = 60.0  # the longest wait for a free port and for wired memory that an earlier process left
END_S = 35  # beyond --drain-s: a last step, the last events, and writes to disk
PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME")
FOLLOW_S = 0.25
SYSTEM_LOG = Path("/var/log/vllm-mlx-start.log")
NOT_INSTALLED = "No service is installed. `vllm-mlx service install MODEL` installs one."
_LOOK_S = 1.0
_ANSWER_S = 2.0

service_app = typer.Typer(no_args_is_help=True, help="Start a server at log-in, and again after a crash.")
UserOption = Annotated[
    str | None, option("--system", "USER", "The service of the machine, which runs as USER and starts at boot.")
]


@dataclass(frozen=True, slots=True)
class Place:
    """The places of a service's files, below the home folder of its user."""

    home: Path
    user: str | None = None

    @classmethod
    def of(cls, user: str | None) -> "Place":
        """Raise CommandFailed for an unknown user."""
        if user is None:
            return cls(Path.home())
        try:
            return cls(Path(pwd.getpwnam(user).pw_dir), user)
        except KeyError as error:
            raise CommandFailed(f"This machine has no user {user}.") from error

    @property
    def settings(self) -> Path:
        return self.home / SERVICE_FILE

    @property
    def keys(self) -> Path:
        return self.home / SERVICE_KEYS

    @property
    def history(self) -> Path:
        return self.home / ".local/state/vllm-mlx/service.json"

    @property
    def log(self) -> Path:
        logs = "Library/Logs/vllm-mlx" if sys.platform == "darwin" else ".local/state/vllm-mlx"
        return self.home / logs / "service.log"

    @property
    def early_log(self) -> Path:
        """Return the log of the process before it opens its own. Root's supervisor opens no file in a home."""
        return SYSTEM_LOG if self.user else self.log.with_name("service-start.log")

    @contextmanager
    def changes(self, path: Path) -> Iterator[None]:
        """Act with the rights of the service's user where `path` is below the user's home. Raises CommandFailed."""
        try:
            with rights_of(self.user if path.is_relative_to(self.home) else None):
                yield
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {error.strerror}.") from error

    def write(self, path: Path, text: str, mode: int = 0o600) -> None:
        """Write a file, for the user of the service alone unless `mode` opens it to others. Raises CommandFailed."""
        with self.changes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, text.encode())
            path.chmod(mode)
            if self.user and path == SYSTEM_LOG:
                shutil.chown(path, self.user)

    def move(self, path: Path, to: Path) -> None:
        """Rename a file, if it exists. Raises CommandFailed."""
        with self.changes(path):
            if path.exists():
                path.rename(to)

    def remove(self, *paths: Path) -> None:
        """Remove the files that exist. Raises CommandFailed."""
        for path in paths:
            with self.changes(path):
                path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class History:
    """The last starts of the service, in seconds of the system's clock, and why it gave up."""

    starts: tuple[float, ...] = ()
    reason: str | None = None

    @classmethod
    def read(cls, path: Path) -> "History":
        try:
            values = json.loads(path.read_text())
            return cls(tuple(float(start) for start in values["starts"]), values["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def started(self, now: float) -> "History":
        """Return the history after one more start."""
        return History((*self.starts, now)[-(MAX_SHORT_RUNS + 1) :])

    @property
    def ends_too_often(self) -> bool:
        """Return whether the last `MAX_SHORT_RUNS` runs were all short: the next start followed soon."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self.starts)]
        return len(gaps) == MAX_SHORT_RUNS and max(gaps) < SHORT_RUN_S + THROTTLE_S

    def text(self) -> str:
        return json.dumps(asdict(self))


@service_app.command()
@takes_settings
def install(
    settings: Settings,
    user: UserOption = None,
    print_only: Annotated[bool, option("--print", None, "Print the files instead of writing them.")] = False,
) -> None:
    """Keep a server of MODEL running with these settings. A second `install` replaces the first."""
    from .doctor import check_models
    from .serve import accepted

    if settings.join is None:
        accepted(settings)
    else:
        check_working(settings)
    for check in check_models(settings):
        if check.verdict == "bad":
            raise ConfigError(f"{check.name}: {check.text}.")
    place = Place.of(user)
    service = _supervisor(place, settings.drain_s)
    written, keys = texts(settings)
    if print_only:
        kept = f"# {place.keys} gets the keys, with mode 600.\n" if keys else ""
        print(f"# {service.path}\n{service.definition()}\n# {place.settings}\n{written}{kept}", end="")
        return
    aside: dict[Path, Path] = {}
    try:
        for path in _files(place, service):
            place.move(path, old := path.with_name(f"{path.name}.before"))
            aside[path] = old
        place.write(place.settings, written)
        place.write(place.keys, keys)
        place.write(place.history, History().text())
        place.write(place.early_log, "")
        place.write(service.path, service.definition(), mode=0o644)  # it belongs to the user who installs the service
        service.start()
    except CommandFailed:
        for path, old in aside.items():
            with suppress(CommandFailed):
                place.remove(path)
                place.move(old, path)
        with suppress(CommandFailed):
            if service.path.exists():
                service.start()  # the service that was there before
        raise
    place.remove(*aside.values())
    when = "with this machine" if user else "at log-in"
    print(f"The service is installed: {service.name} starts it {when}, and did.")
    print(f"Settings: {place.settings}\nLog: {place.log}\n`vllm-mlx service status` says when it is ready.")


@service_app.command()
def status(user: UserOption = None) -> None:
    """Print whether the service runs and answers, or the reason. The exit code is 1 if it does not answer."""
    place = Place.of(user)
    settings, state = _settings(place), _supervisor(place).state()
    if not state.is_installed:
        raise CommandFailed(NOT_INSTALLED)
    history = History.read(place.history)
    url = local_url(settings.host, settings.port)
    print(f"Process: {state.pid or 'none'}\nURL: {url}\nSettings: {place.settings}\nLog: {place.log}")
    if history.reason is not None and state.pid is None:
        raise CommandFailed(
            f"The service has ended, and is not started again by itself: {history.reason} Change the settings with "
            "`vllm-mlx service install`, or try again with `vllm-mlx service restart`."
        )
    if settings.join is not None and state.pid is not None:
        print(f"It is a worker of the server at {settings.join}.")
        return
    if state.pid is None:
        raise CommandFailed("The service does not run. `vllm-mlx service restart` starts it.")
    try:
        name = Remote(url, next(iter(settings.api_keys), None), answer_s=_ANSWER_S).model().name
    except NoServer as error:
        raise CommandFailed("It does not answer yet: it is loading the model, or waits for its port.") from error
    print(f"It serves {name}.")


@service_app.command()
def logs(
    user: UserOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", help="Last lines to print.", min=0)] = 50,
) -> None:
    """Print the end of the service's log."""
    place = Place.of(user)
    for line in itertools.chain(last_lines(place.log, num_lines), new_lines(place.log) if follow else ()):
        print(printable(line), end="", flush=True)


@service_app.command()
def restart(user: UserOption = None) -> None:
    """End the service, which may finish its replies, and start it again."""
    place = Place.of(user)
    service = _installed(place)
    place.write(place.history, History().text())
    service.start()
    print("The service starts again. `vllm-mlx service status` says when it is ready.")


@service_app.command()
def uninstall(user: UserOption = None) -> None:
    """End the service and remove it with its settings and keys. The cache and the log stay."""
    place = Place.of(user)
    service = _installed(place)
    service.stop()
    place.remove(*_files(place, service))
    print(f"The service is removed. Its log stays in {place.log.parent}.")


@service_app.command(hidden=True)
def run() -> None:
    """Run the server as the service. launchd or systemd starts this command."""
    from .serve import run_server

    place = Place(Path.home())
    log = LogFile(place.log)
    place.log.parent.mkdir(parents=True, exist_ok=True)
    log.open()
    history = History.read(place.history).started(time.time())
    place.write(place.history, history.text())
    try:
        if history.ends_too_often:
            raise CommandFailed(f"It ended {MAX_SHORT_RUNS} times within {SHORT_RUN_S:.0f} seconds of its start.")
        settings = _settings(place)
        if settings.join is not None:
            run_worker(settings, log)
            raise BrokeDown("The server has stopped. The worker starts again, and waits for the next one.")
        wait_for_room(settings)
        run_server(settings, log)
    except VLLMMLXError as error:
        if exit_code_of(error) is ExitCode.RESTART:
            raise
        place.write(place.history, replace(history, reason=error.message).text())
        write_last(error.message)
        sys.exit(ExitCode.DONE)


def wait_for_room(settings: Settings) -> None:
    """Wait until the port is free and little memory is wired, for at most a minute. An earlier process may hold both.

    Raises ConfigError if the port stays taken. Memory that stays wired is a matter of the load, which warns of it.
    """
    from ..engine.macos import wired_bytes
    from ..engine.sizing import is_much_wired
    from ..server.run import listen

    deadline_s = time.monotonic() + ROOM_S
    while True:
        is_late = time.monotonic() > deadline_s
        try:
            listen(settings.host, settings.port).close()
            if is_late or not is_much_wired(wired_bytes()):
                return
        except ConfigError:
            if is_late:
                raise
        time.sleep(_LOOK_S)


def last_lines(path: Path, num_lines: int) -> Iterator[str]:
    """Return the last lines of a log, over all of its files."""
    lines: deque[str] = deque(maxlen=num_lines)
    for file in log_files(path):
        with suppress(FileNotFoundError), file.open(encoding="utf-8", errors="replace") as stream:
            lines.extend(stream)
    return iter(lines)


def new_lines(path: Path) -> Iterator[str]:
    """Yield the lines that come from now on, without an end, also when the log begins a new file."""
    while not path.exists():
        time.sleep(FOLLOW_S)
    stream: TextIO = path.open(encoding="utf-8", errors="replace")
    rest = ""
    stream.seek(0, os.SEEK_END)
    while True:
        newer = _newer_file(path, stream)  # asked before the rest is read, which is complete if there is a newer file
        while part := stream.readline():
            rest += part
            if rest.endswith("\n"):
                yield rest
                rest = ""
        if newer is None:
            time.sleep(FOLLOW_S)
        else:
            stream.close()
            stream = newer


def _newer_file(path: Path, stream: TextIO) -> TextIO | None:
    """Open the file of the log that follows `stream`, or the oldest one if `stream` was removed.

    Returns None if `stream` is the newest.
    """
    opened = []  # newest first: files move towards older names, so that one may be seen twice, and none is missed
    for file in reversed(log_files(path)):
        with suppress(FileNotFoundError):
            opened.append(file.open(encoding="utf-8", errors="replace"))
    mine = os.fstat(stream.fileno())
    same = [at for at, other in enumerate(opened) if os.path.samestat(os.fstat(other.fileno()), mine)]
    following = opened[: same[0]] if same else opened
    for other in opened:
        if other not in following[-1:]:
            other.close()
    return following[-1] if following else None


def _files(place: Place, service: Supervisor) -> tuple[Path, ...]:
    return service.path, place.settings, place.keys, place.history, place.early_log


def _supervisor(place: Place, drain_s: float | None = None) -> Supervisor:
    """Return the supervisor of this machine. Without `drain_s`, the time to end is that of the installed settings."""
    if drain_s is None:
        settings = service_settings(place.home)
        drain_s = 0.0 if settings is None else settings.drain_s
    job = Job(
        command=(str(program_path(sys.argv[0])), "service", "run"),
        home=place.home,
        user=place.user,
        early_log=place.early_log,
        stop_s=int(drain_s) + END_S,
        environment={name: os.environ[name] for name in PASSED_ON if name in os.environ},
    )
    return supervisor(job)


def _settings(place: Place) -> Settings:
    """Raise CommandFailed if no service is installed."""
    settings = service_settings(place.home)
    if settings is None:
        raise CommandFailed(NOT_INSTALLED)
    return settings


def _installed(place: Place) -> Supervisor:
    service = _supervisor(place)
    if not (place.settings.exists() and service.path.exists()):
        raise CommandFailed(NOT_INSTALLED)
    return service


def texts(settings: Settings) -> tuple[str, str]:
    """Return the settings file and the key file as TOML, with absolute paths: a service has its own folder."""
    names = settings.model_fields_set - (OF_A_MODEL if settings.models else set()) - {"models", "api_key"}
    tables = [f"\n[[models]]\n{_lines(listed, listed.model_fields_set)}" for listed in settings.models]
    return _lines(settings, names) + "".join(tables), _lines(settings, settings.model_fields_set & {"api_key"})


def _lines(values: BaseModel, names: Iterable[str]) -> str:
    lines = []
    for name in sorted(names):
        value = _plain(getattr(values, name))
        if name == "model" and Path(value).expanduser().is_dir():
            value = str(Path(value).expanduser().resolve())
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)


def _plain(value: Any) -> Any:
    """Return a setting's value in the types of TOML."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case ReasoningStrings(start=start, end=end):
            return json.dumps({"reasoning_start_str": start, "reasoning_end_str": end})
        case Path():
            return str(value.expanduser().absolute())
        case tuple() | list():
            return [_plain(part) for part in value]
        case _:
            return value
