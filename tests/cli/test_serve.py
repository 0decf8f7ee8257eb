"""`vllm-mlx serve` as a process: from the command line to a reply and back to the prompt."""

import itertools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.sources import ROOT
from tests.support.commands import call, refusal, run, served
from tests.support.rows import cases
from vllm_mlx.cli.serve import refuse_open_door
from vllm_mlx.cli.terminal import ExitCode
from vllm_mlx.core.errors import ConfigError


def paste(printed: str, **replaced: str) -> dict[str, object]:
    """Send the request that the server printed, as curl would."""
    words = shlex.split(printed[printed.index("curl ") : printed.index("\n\nCtrl-C")].replace("\\\n", " "))
    headers = dict(word.split(": ", 1) for flag, word in itertools.pairwise(words) if flag == "-H")
    body = json.loads(words[words.index("-d") + 1]) | {"max_tokens": 5}
    headers |= replaced
    with urllib.request.urlopen(urllib.request.Request(words[1], json.dumps(body).encode(), headers)) as reply:
        parsed: dict[str, object] = json.load(reply)
        return parsed


def test_the_printed_request_is_answered_no_key_is_printed_and_ctrl_c_ends_the_server(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    log, link = tmp_path / "log", tmp_path / "vllm-mlx"
    link.symlink_to(Path(sys.executable).with_name("vllm-mlx"))  # as scripts/install makes it
    arguments = (str(checkpoint("qwen3")), "--served-model-name", "tiny one")
    with (
        log.open("w") as stderr,
        served(*arguments, stderr=stderr, command=[str(link)], PATH=f"{tmp_path}:/bin", VLLM_MLX_API_KEY="s3cret") as (
            process,
            printed,
        ),
    ):
        assert "Install" not in printed and "s3cret" not in printed
        assert re.search(r"qwen3, 1\.\d MB of weights", printed)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            paste(printed)
        reply = paste(printed, Authorization="Bearer s3cret")
        assert reply["model"] == "tiny one"
        assert reply["usage"]["completion_tokens"] <= 5  # type: ignore[index]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    *_, stopping, last = log.read_text().splitlines()
    assert stopping.endswith("Ctrl-C again ends them now.") and last.endswith("INFO Stopped.")


EARLY = """
import sys
sys.addaudithook(lambda event, given: event == "import" and given[0] == "{module}" and print("here", flush=True))
from vllm_mlx.cli.main import main
main()
"""


def early(stop: signal.Signals, module: str, command: str = "serve", after_s: float = 0) -> tuple[int, str]:
    """The exit code of a command that gets a signal `after_s` after it began to import the module, and its errors."""
    started = [sys.executable, "-c", EARLY.format(module=module), command, *(["--port", "0"] * (command == "serve"))]
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "here\n":
        assert process.poll() is None
    time.sleep(after_s)
    process.send_signal(stop)
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, err


STOPS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.DONE, signal.SIGHUP: ExitCode.DONE}
SOME = [(signal.SIGINT, "typer"), (signal.SIGTERM, "mlx.core")]


@pytest.mark.parametrize(
    "moment", cases(itertools.product(STOPS, ["typer", "mlx.core"]), SOME), ids=lambda each: f"{each[0].name}-{each[1]}"
)
def test_a_signal_during_the_start_ends_it_at_once(moment: tuple[signal.Signals, str]) -> None:
    assert early(*moment)[0] == STOPS[moment[0]]


@pytest.mark.full
@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_at_any_moment_of_the_start(moment: int) -> None:
    code, err = early(signal.SIGINT, "mlx.core", after_s=moment / 4)
    assert code == ExitCode.INTERRUPTED or (code == ExitCode.DONE and "running replies" in err)


def test_ctrl_c_while_another_command_starts_shows_no_traceback() -> None:
    assert early(signal.SIGINT, "typer", "status") == (ExitCode.INTERRUPTED, "")


@pytest.mark.full
def test_a_clone_that_is_not_on_the_path_names_its_script(checkpoint: Callable[..., Path]) -> None:
    with served(str(checkpoint("qwen3")), command=(sys.executable, "-m", "vllm_mlx"), PATH="/bin") as (_, printed):
        told = f"{ROOT}/scripts/install puts `vllm-mlx` on your PATH for good"
        assert told.replace(" ", "") in "".join(printed.split()), printed


def test_a_port_in_use_is_said_before_anything_is_loaded(checkpoint: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (call, run):  # in this process, and in one that ends by it
            result = command("serve", str(checkpoint("qwen3")), "--port", port)
            assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
            assert result.stderr.startswith(f"vllm-mlx: Port {port} on 127.0.0.1 is taken.")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    missing = call("serve", str(tmp_path / "nothing"), "--port", "0")
    too_long = call("serve", str(checkpoint("qwen3")), "--port", "0", "--max-model-len", "999999999")
    assert (missing.returncode, too_long.returncode) == (1, 1)
    assert missing.stderr.splitlines()[-1].startswith("vllm-mlx: No folder ")
    assert too_long.stderr.splitlines()[-1].startswith("vllm-mlx: --max-model-len 999999999 exceeds")


def test_a_file_of_records_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(
        "serve", "some-org/some-model", "--port", "0", "--record-requests", str(tmp_path / "file" / "records")
    )
    assert line.startswith("vllm-mlx: --record-requests") and line.endswith(
        "cannot be written: File exists. Name another file."
    )


def test_an_open_door_is_refused_before_anything_loads() -> None:
    assert refusal("serve", "--host", "0.0.0.0").startswith(
        "vllm-mlx: --host 0.0.0.0 makes the server reachable from other machines"
    )


BROKEN = """
import sys
from vllm_mlx.cli.main import main
from vllm_mlx.engine import loading

def start(*_):
    raise {error}

loading.start_engine = start
sys.argv = ["vllm-mlx", "serve", "demo", "--port", "0"]
main()
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ('ValueError("nobody thought of this")', ExitCode.FAILED),
        ('IsADirectoryError(21, "Is a directory")', ExitCode.FAILED),
        ('OSError(28, "No space left on device")', ExitCode.RESTART),
        ('RuntimeError("[METAL] Command buffer execution failed")', ExitCode.RESTART),
    ],
)
def test_only_an_error_that_may_pass_asks_to_be_started_again(error: str, code: ExitCode) -> None:
    program = BROKEN.replace("{error}", error)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == code
    *trace, last = result.stderr.splitlines()
    assert last.startswith(f"vllm-mlx: The server ended with an internal error: {error.partition('(')[0]}: ")
    assert "Traceback (most recent call last):" in trace


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "mymac.local"])
def test_beyond_this_machine_a_key_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key or --api-key-file, or set --insecure") as caught:
        refuse_open_door(host, has_keys=False, insecure=False)
    assert "\n" not in caught.value.message
    refuse_open_door(host, has_keys=True, insecure=False)
    refuse_open_door(host, has_keys=False, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_this_machine_alone_needs_none(host: str) -> None:
    refuse_open_door(host, has_keys=False, insecure=False)
