"""`vllm-mlx service` under supervisors with the rules of launchd and systemd: real processes, files and sockets."""

import contextlib
import logging.handlers
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from scripts.served import free_port
from tests.support.commands import write_script
from tests.support.harm.vitals import Vitals
from tests.support.rows import cases
from tests.support.supervisors import Machine
from vllm_mlx.cli import service as cli
from vllm_mlx.cli.options import load_settings, service_settings
from vllm_mlx.cli.output import log_files
from vllm_mlx.cli.service import History, Place, last_lines, new_lines, texts
from vllm_mlx.cli.settings import AllSettings, settings_fields
from vllm_mlx.cli.supervisors import Launchd, Systemd

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120.0
_KEY = "sk-a-secret-of-this-service"


@pytest.fixture(params=[Launchd, pytest.param(Systemd, marks=pytest.mark.full)])  # most users have macOS
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A user's home and a supervisor; `vllm-mlx` is a script that runs this checkout."""
    machine = Machine(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", machine.path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(cli, "supervisor", request.param)
    program(tmp_path, monkeypatch, "from vllm_mlx.cli.main import main; main()")
    yield machine
    machine.close()


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Install a `vllm-mlx` that runs `code`."""
    path = folder / "bin" / "vllm-mlx"
    write_script(path, f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(_ROOT)!r})\n{code}\n")
    monkeypatch.setattr(sys, "argv", [str(path)])


def service(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command; an error is its message."""
    result = CliRunner().invoke(cli.service_app, list(arguments))
    message = getattr(result.exception, "message", None)
    if message is None and result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return (result.exit_code, result.output) if message is None else (1, message)


def files_below(folder: Path) -> dict[Path, bytes]:
    """The files of a home, but for its programs."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "bin" not in path.parts]
    return {path: path.read_bytes() for path in paths}


def wait_until(condition: object, what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def answers(port: int) -> bool:
    """Once something listens on the port, this waits for its reply."""
    with contextlib.suppress(httpx.TransportError):  # also of a server that is just ending
        return httpx.get(
            f"http://127.0.0.1:{port}/health", timeout=_PATIENCE_S, trust_env=False, verify=False
        ).is_success
    return False


def test_a_service_waits_for_its_port_answers_and_is_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    from vllm_mlx.server.run import listen

    model, port, refused = checkpoint("qwen3"), free_port(), tmp_path / "refused"
    program(
        tmp_path,
        monkeypatch,
        "from pathlib import Path\n"
        "from vllm_mlx.cli.main import main\n"
        "from vllm_mlx.server import run\n"
        "listen = run.listen\n"
        "def look(*given):\n"
        "    try: return listen(*given)\n"
        f"    except Exception: Path({str(refused)!r}).touch(); raise\n"
        "run.listen = look\n"
        "main()",
    )
    held = listen("127.0.0.1", port)
    arguments = ("--port", str(port), "--api-key", _KEY, "--cache-disk", "0", "--drain-s", "60")
    assert service("install", str(model), *arguments)[0] == 0
    wait_until(refused.exists, "the service does not look for its port")
    held.close()
    wait_until(lambda: answers(port), "the service does not take the port")
    assert machine.job is not None and machine.job.num_starts == 1
    refused.unlink()
    code, text = service("status")
    assert code == 0 and f"It serves {model.name}." in text
    assert machine.job.process is not None

    # No key is in a definition, in the settings or in a command line.
    argv = Vitals(machine.job.process.pid).command_line()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and _KEY in path.read_text(errors="replace")]
    assert "service run" in argv and _KEY not in argv and files == [Place(tmp_path).keys]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600

    first = machine.job
    assert service("install", str(model), *arguments)[0] == 0  # a second one replaces the first
    assert machine.job is not first and first.codes == [0]
    wait_until(lambda: answers(port), "the second service does not answer")

    # A reply that runs while the service is removed is whole.
    body = {"prompt": "One, two,", "max_tokens": 500, "ignore_eos": True, "stream": True}
    lines: list[str] = []

    def stream() -> None:
        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{port}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {_KEY}"},
            timeout=_PATIENCE_S,
        ) as reply:
            lines.extend(reply.iter_lines())

    client = threading.Thread(target=stream)
    client.start()
    wait_until(lambda: lines, "the reply does not begin")
    assert service("uninstall")[0] == 0
    client.join()
    assert "data: [DONE]" in lines
    assert machine.job is None
    left = [path for path in tmp_path.rglob("*") if path.is_file() and "bin" not in path.parts]
    assert {path.name for path in left} <= {"service.log", ".lock"}, left
    assert service("status") == (1, cli.NOT_INSTALLED)


# What the process does, the starts that this gives, and what `status` says then.
_MAX_RUNS = 2  # in place of MAX_SHORT_RUNS, because each takes a second
_ENDS = {
    "setting": ("raise ConfigError('A setting is wrong.')", 1, "A setting is wrong."),
    "done": ("sys.exit(0)", 1, None),
    "usage": ("raise WrongUsage('It is not a flag.')", 1, "It is not a flag."),
    "interrupted": ("sys.exit(130)", _MAX_RUNS + 1, "It ended 2 times"),
    "crash": ("raise BrokeDown('The GPU failed.')", _MAX_RUNS + 1, "It ended 2 times"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", _MAX_RUNS + 1, "It ended 2 times"),
}


@pytest.mark.parametrize("end", cases(_ENDS, ["setting", "crash"]))
def test_a_service_that_ends_is_started_so_often(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    code, num_starts, reason = _ENDS[end]
    program(
        tmp_path,
        monkeypatch,
        "import os, signal\n"
        "from vllm_mlx.cli import serve, service\n"
        "from vllm_mlx.cli.main import main\n"
        "from vllm_mlx.cli.terminal import BrokeDown, WrongUsage\n"
        "from vllm_mlx.core.errors import ConfigError\n"
        f"def ended(*_):\n    {code}\n"
        "serve.run_server = ended\n"
        "service.wait_for_room = lambda _: None\n"
        f"service.MAX_SHORT_RUNS = {_MAX_RUNS}\n"
        "main()",
    )
    assert service("install", "demo")[0] == 0
    assert machine.job is not None and machine.job.thread is not None
    machine.job.thread.join(_PATIENCE_S)
    assert not machine.job.thread.is_alive() and machine.job.num_starts == num_starts
    code, text = service("status")
    assert code == 1 and (reason is None or reason in text)

    if num_starts > 1:
        assert service("restart")[0] == 0  # the user asks for it, so that starts count anew
        machine.job.thread.join(_PATIENCE_S)
        assert machine.job.num_starts == num_starts


def test_settings_that_serve_refuses_are_not_installed(machine: Machine, tmp_path: Path) -> None:
    for wrong in (("no-such-model",), ("demo", "--host", "0.0.0.0"), ("demo", "--tool-call-parser", "unknown")):
        code, text = service("install", *wrong)
        assert code == 1 and text.endswith(".")
    assert not Place(tmp_path).settings.exists() and machine.job is None


def test_a_supervisor_that_refuses_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(cli, "supervisor", Systemd)
    program(tmp_path, monkeypatch, "")
    write_script(tmp_path / "bin" / "systemctl", "#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n")
    code, text = service("install", "demo", "--api-key", _KEY)
    assert code == 1 and text.endswith("Failed to connect to bus")
    assert files_below(tmp_path) == {}


def test_a_second_service_that_cannot_start_leaves_the_first(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "import signal; signal.pause()")
    assert service("install", "demo", "--port", "8123", "--api-key", _KEY)[0] == 0
    before = files_below(tmp_path)
    for name in ("launchctl", "systemctl"):  # they refuse one start
        shim = tmp_path / "bin" / name
        real = shim.rename(shim.with_name(f"real-{name}"))
        write_script(
            shim,
            f'#!/bin/sh\ncase "$*" in *bootstrap*|*restart*) mv {real} {shim}; echo No. >&2; exit 1;; esac\n'
            f'exec {real} "$@"\n',
        )
    code, text = service("install", "demo", "--port", "8124", "--api-key", "sk-another", "--drain-s", "9")
    assert code == 1 and text.endswith("No.")
    assert files_below(tmp_path) == before
    assert machine.job is not None
    wait_until(lambda: machine.job.process is not None, "the first service does not run")  # type: ignore[union-attr]
    assert stat.S_IMODE(Place(tmp_path).keys.stat().st_mode) == 0o600


def test_print_writes_nothing(machine: Machine, tmp_path: Path) -> None:
    code, text = service("install", "demo", "--print", "--api-key", _KEY)
    assert code == 0 and "vllm-mlx" in text and _KEY not in text
    assert not (tmp_path / ".config").exists() and machine.job is None


def test_every_setting_survives_the_files(tmp_path: Path) -> None:
    """Each setting, with an example of its type, is read back as it was."""
    (tmp_path / "keys").write_text("ann:sk-1\n")
    examples = {
        "api_key": ("sk-1", "sk-2"), "chat_template": "{{ 'a\"b\\\\n' }}", "cache_disk": 0, "memory_budget": "0.7",
        "reasoning_config": '{"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}', "cache_memory": "2GB",
        "limit_mm_per_prompt": "image=3", "api_key_file": str(tmp_path / "keys"), "max_body": "64MiB",
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    }  # fmt: skip
    for name, field, _ in settings_fields():
        value = examples.get(name, field.default)
        if value is None:
            continue
        settings = AllSettings(**{name: list(value) if isinstance(value, tuple) else value})
        written, keys = texts(settings)
        place = Place(tmp_path)
        place.write(place.settings, written)
        place.write(place.keys, keys)
        read = service_settings(place.home)
        if name != "model":
            assert getattr(read, name) == getattr(settings, name), name


def test_a_list_of_models_survives_the_files(tmp_path: Path) -> None:
    file, again = tmp_path / "models.toml", tmp_path / "again.toml"
    first = 'model = "demo"\nname = "coder"\nmatch = ["claude-*"]\nmax-model-len = 4096\npin = true\n'
    file.write_text(f'port = 1234\n[[models]]\n{first}[[models]]\nmodel = "org/small"\ntext_only = true\n')
    written, keys = texts(load_settings({"api_key": ["sk-1"]}, file))
    again.write_text(written)
    assert load_settings({}, again) == load_settings({}, file) and keys == 'api_key = ["sk-1"]\n'


def test_starts_that_come_late_enough_are_no_loop() -> None:
    history = History()
    for now in (0.0, 1.0, 2.0, 3.0, 4.0, 200.0, 201.0, 202.0):
        history = history.started(now)
        assert not history.ends_too_often
    for now in (203.0, 204.0, 205.0):
        history = history.started(now)
    assert history.ends_too_often


def test_the_end_of_the_log_is_printed_and_controls_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    log = Place(tmp_path).log
    log.parent.mkdir(parents=True)
    log.write_text("one\n\x1b[2Jtwo\nthree\n")
    assert service("logs", "-n", "2") == (0, "[2Jtwo\nthree\n")


_LINES = """
import logging, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from vllm_mlx.cli.output import LogFile
from vllm_mlx.cli.output import configure_logging
told = os.fdopen(os.dup(1), "w")
log = LogFile(Path({path!r}))
log.open()
configure_logging("info", log)
logger = logging.getLogger("vllm_mlx")
for number in range({num}):
    logger.info("%d %s", number, "x" * {length})
    if number % {at_once} == {at_once} - 1:
        logging.getLogger().handlers[0].stream.flush(60)
        print(number, file=told, flush=True)
        sys.stdin.readline()
"""


def test_a_reader_loses_no_line_and_repeats_none_while_files_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "FOLLOW_S", 0.0001)
    path, num, at_once = tmp_path / "service.log", 4000, 8
    path.touch()
    seen = followed(path)
    writer = logging.handlers.RotatingFileHandler(path, maxBytes=400, backupCount=len(log_files(path)) - 1)
    for number in range(1, num + 1):
        writer.emit(logging.makeLogRecord({"msg": f"{number} {'x' * 60}"}))
        while number % at_once == 0 and not seen[-1].startswith(f"{number} "):
            time.sleep(0)
    writer.close()
    assert [int(line.split()[0]) for line in seen if "Nothing yet" not in line] == [*range(1, num + 1)]


def followed(path: Path) -> list[str]:
    """The lines that a reader of the log finds from now on."""
    seen: list[str] = []
    threading.Thread(target=lambda: seen.extend(new_lines(path)), daemon=True).start()
    while not seen:  # it begins at the end of the file, whenever it comes
        with path.open("a") as file:
            file.write("Nothing yet.\n")
        time.sleep(0.01)
    return seen


def test_much_log_stays_within_its_files_and_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader follows, which is never farther behind than the files that are kept."""
    monkeypatch.setattr(cli, "FOLLOW_S", 0.01)
    path = tmp_path / "service.log"
    num, at_once = 6_500, 250
    path.touch()
    seen = followed(path)
    code = _LINES.format(root=str(_ROOT), path=str(path), num=num, length=10_000, at_once=at_once)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for line in writer.stdout:
            wait_until(lambda last=f" {int(line)} x": last in seen[-1], "the reader does not follow")
            print(file=writer.stdin, flush=True)
    files = [file for file in log_files(path) if file.exists()]
    assert len(files) == 5 and all(file.stat().st_size <= 10_000_000 for file in files)
    kept = [int(line.split()[3]) for line in last_lines(path, num)]
    assert kept == list(range(num - len(kept), num)) and len(kept) > 4_000
    assert [int(line.split()[3]) for line in seen if "Nothing yet" not in line] == list(range(num))
