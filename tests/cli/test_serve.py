"""`vllm-mlx serve` as a process: from the command line to a reply and back to the prompt."""

import itertools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, served
from vllm_mlx.cli.terminal import ExitCode


def refusal(*arguments: str) -> str:
    result = subprocess.run([*COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def paste(printed: str, **replaced: str) -> dict[str, object]:
    """Send the request that the server printed, as curl would."""
    words = shlex.split(printed[printed.index("curl ") : printed.index("\n\nCtrl-C")].replace("\\\n", " "))
    headers = dict(word.split(": ", 1) for flag, word in itertools.pairwise(words) if flag == "-H")
    body = json.loads(words[words.index("-d") + 1]) | {"max_tokens": 5}
    headers |= replaced
    with urllib.request.urlopen(urllib.request.Request(words[1], json.dumps(body).encode(), headers)) as reply:
        parsed: dict[str, object] = json.load(reply)
        return parsed


def test_the_printed_request_is_answered_and_ctrl_c_ends_the_server(checkpoint: Callable[..., Path]) -> None:
    with served(str(checkpoint("qwen3")), "--served-model-name", "tiny one") as (process, printed):
        assert re.search(r"qwen3, 1\.\d MB of weights", printed)
        reply = paste(printed)
        assert reply["model"] == "tiny one"
        assert reply["usage"]["completion_tokens"] <= 5  # type: ignore[index]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_a_key_from_the_environment_is_asked_for_and_not_printed(checkpoint: Callable[..., Path]) -> None:
    with served(str(checkpoint("qwen3")), VLLM_MLX_API_KEY="s3cret") as (process, printed):
        assert "s3cret" not in printed
        assert paste(printed, Authorization="Bearer s3cret")["object"] == "chat.completion"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            paste(printed)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == ExitCode.DONE


def test_a_port_in_use_is_said_before_anything_is_loaded(checkpoint: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refusal(str(checkpoint("qwen3")), "--port", port).startswith(
            f"vllm-mlx: Port {port} on 127.0.0.1 is taken."
        )


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    assert refusal(str(tmp_path / "nothing"), "--port", "0").startswith("vllm-mlx: ")
    too_long = refusal(str(checkpoint("qwen3")), "--port", "0", "--max-model-len", "999999999")
    assert too_long.startswith("vllm-mlx: --max-model-len 999999999 exceeds")


def test_a_folder_of_records_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal("some-org/some-model", "--port", "0", "--record-requests", str(tmp_path / "file" / "records"))
    assert line.startswith("vllm-mlx: --record-requests") and line.endswith("Not a directory. Name another folder.")


def test_an_open_door_is_refused_before_anything_loads() -> None:
    assert refusal("--host", "0.0.0.0").startswith("vllm-mlx: --host 0.0.0.0 opens the server beyond this machine")


BROKEN = """
import sys
from vllm_mlx.cli.main import main
from vllm_mlx.engine import loading

def start(config, disk):
    raise ValueError("nobody thought of this")

loading.start_engine = start
sys.argv = ["vllm-mlx", "serve", "demo", "--port", "0"]
main()
"""


def test_an_error_of_the_server_itself_asks_to_be_started_again() -> None:
    result = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == ExitCode.RESTART
    *trace, last = result.stderr.splitlines()
    assert last == "vllm-mlx: The server ended with an internal error: ValueError: nobody thought of this"
    assert "Traceback (most recent call last):" in trace
