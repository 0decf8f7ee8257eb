"""The settings of a model on several Macs: what `serve` and `worker` need, and what they refuse with which advice."""

import json
from pathlib import Path

import pytest

from tests.support.commands import call, refusal
from vllm_mlx.cli.options import load_settings
from vllm_mlx.cli.worker import check_leading, check_working
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks import handshake


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("a secret of the tests")
    path.chmod(0o600)
    return str(path)


def refused(**flags: object) -> str:
    """What `serve` says, or a worker if it has a server."""
    settings = load_settings(flags)
    with pytest.raises(ConfigError) as error:
        if "join" in flags and "tensor_parallel_size" not in flags:
            check_working(settings)
        else:
            check_leading(settings, settings.engine_config().tensor_parallel_size)
    return error.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("worker_port", 21005), ("worker_host", "10.0.0.1"), ("secret_file", "s"), ("rdma_devices", "d")],
)
def test_flags_of_workers_without_workers_are_refused(name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    text = f"{flag} has no effect without workers. Set --tensor-parallel-size, or leave it out."
    assert refused(**{name: value}) == text


def test_several_macs_need_a_port_and_a_secret(secret: str) -> None:
    assert refused(tensor_parallel_size=2) == "--tensor-parallel-size 2 needs --worker-port."
    assert refused(tensor_parallel_size=2, worker_port=21005) == "--tensor-parallel-size 2 needs --secret-file."
    Path(secret).chmod(0o644)
    lax = refused(tensor_parallel_size=2, worker_port=21005, secret_file=secret)
    assert lax == f"Other users may open {secret} (its mode is 644). Run `chmod 600 {secret}`."


def test_several_models_on_several_macs_are_refused() -> None:
    models = [{"model": "demo"}, {"model": "demo", "name": "b"}]
    text = "--tensor-parallel-size is for one model, and 2 are listed. Serve one of them."
    assert refused(models=models, tensor_parallel_size=2) == text


def test_a_list_of_devices_names_each_mac(secret: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    given = {"tensor_parallel_size": 2, "worker_port": 21005, "secret_file": secret, "rdma_devices": str(path)}
    assert f"--rdma-devices {path} cannot be read as JSON" in refused(**given)
    path.write_text("{")
    assert f"--rdma-devices {path} cannot be read as JSON" in refused(**given)
    path.write_text(json.dumps([[None]]))
    assert refused(**given) == f"--rdma-devices {path} must list the devices of each of 2 Macs."


def test_a_worker_needs_a_server_and_the_secret(secret: str) -> None:
    for place in ("10.0.0.1", "10.0.0.1:", "10.0.0.1:70000", "10.0.0.1:0"):
        text = f"--join {place} must be HOST:PORT, the server's --worker-port."
        assert refused(join=place, secret_file=secret) == text
    assert refused(join="10.0.0.1:21005") == "A worker needs --secret-file."
    assert refusal("worker", "demo") == "vllm-mlx: A worker needs --join."


def test_a_server_joins_nobody() -> None:
    assert (
        refused(join="10.0.0.1:1", tensor_parallel_size=1) == "--join is for `vllm-mlx worker`. Leave it out to serve."
    )
    assert "No such option: --join" in call("serve", "demo", "--join", "10.0.0.1:1").stderr


def test_a_worker_whose_checkpoint_is_missing_ends(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TELL_S", 0.1)
    line = refusal("worker", str(tmp_path / "gone"), "--join", "127.0.0.1:1", "--secret-file", secret)
    assert line.startswith(f"vllm-mlx: No folder {tmp_path}/gone.")


def test_a_worker_is_installed_as_a_service(secret: str) -> None:
    printed = call("service", "install", "demo", "--join", "10.0.0.1:21005", "--secret-file", secret, "--print").stdout
    assert 'join = "10.0.0.1:21005"' in printed and f'secret_file = "{secret}"' in printed
    missing = refusal("service", "install", "demo", "--join", "10.0.0.1:21005", "--print")
    assert missing == "vllm-mlx: A worker needs --secret-file."
