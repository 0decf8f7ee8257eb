"""The lock files hold what pyproject.toml asks for, and what was tested."""

import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.sources import ROOT
from vllm_mlx.cli.supervisors import THROTTLE_S

LOCK = ROOT / "scripts/requirements.lock"
TEST_LOCK = ROOT / "scripts/requirements-test.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLATFORMS = [
    {"sys_platform": "darwin", "platform_machine": "arm64"},
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_machine": "aarch64"},
]


def pins(file: Path) -> list[Requirement]:
    return [Requirement(line.rstrip(" \\")) for line in file.read_text().splitlines() if re.match(r"\w", line)]


def versions(locks: Iterable[Path], platform: dict[str, str]) -> dict[str, str]:
    """What an installation of these locks holds on a platform, by canonical name."""
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for lock in locks
        for pin in pins(lock)
        if pin.marker is None or pin.marker.evaluate(platform)
    }


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: "-".join(platform.values()))
@pytest.mark.parametrize(
    ("asked", "locks"),
    [
        (PROJECT["project"]["dependencies"], [LOCK]),
        (PROJECT["dependency-groups"]["build"], [LOCK]),
        (PROJECT["build-system"]["requires"], [LOCK]),
        (PROJECT["project"]["optional-dependencies"]["test"], [LOCK, TEST_LOCK]),
    ],
    ids=["serving", "build", "build-system", "tests"],
)
def test_each_requirement_is_locked_within_its_bounds(platform, asked, locks):
    locked = versions(locks, platform)
    for requirement in map(Requirement, asked):
        if requirement.marker is None or requirement.marker.evaluate(platform):
            version = locked.get(canonicalize_name(requirement.name))
            assert version and requirement.specifier.contains(version), f"{requirement}: run scripts/lock"


def test_each_platform_has_its_own_build_of_mlx():
    darwin, *linux = [
        {name for name in versions([LOCK], platform) if name.startswith("mlx-")} for platform in PLATFORMS
    ]
    assert darwin >= {"mlx-metal"} and "mlx-cpu" not in darwin
    assert all(found >= {"mlx-cpu"} and "mlx-metal" not in found for found in linux)


@pytest.mark.parametrize("lock", [LOCK, TEST_LOCK], ids=lambda lock: lock.name)
def test_each_version_is_exact_and_has_hashes_and_no_address_is_named(lock):
    text = lock.read_text()
    assert "://" not in text and "--index" not in text
    entries = re.split(r"\n(?=\w)", text)[1:]
    assert entries
    for entry in entries:
        assert re.match(r"[\w.-]+==[\w.!+]+( ;[^\n]*)? \\\n    --hash=sha256:[0-9a-f]{64}\b", entry), entry


def test_the_two_locks_name_no_package_twice():
    names = [canonicalize_name(pin.name) for lock in (LOCK, TEST_LOCK) for pin in pins(lock)]
    assert len(names) == len(set(names))


def test_each_dependency_has_an_upper_bound():
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in map(
        Requirement, [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    ):
        assert any(part.operator in ("<", "==") for part in requirement.specifier), requirement


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the formula names a commit of a clone")
def test_the_formula_of_homebrew_installs_what_the_lock_names(tmp_path):
    def text_of(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    repository = "https://example.org/a/vllm-mlx.git"
    formula = text_of(ROOT / "scripts/formula", repository)
    embedded = tmp_path / "embedded.lock"
    embedded.write_text(re.sub(r"(?m)^ {4}", "", re.search(r"<<~'PINS'.*\n((?: {4}.*\n)+)  PINS\n", formula)[1]))
    assert list(map(str, pins(embedded))) == list(map(str, pins(LOCK)))
    assert re.findall(r"sha256:\w+", formula) == re.findall(r"sha256:\w+", LOCK.read_text())
    revision = text_of("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    assert f'url "{repository}", using: :git, revision: "{revision}"' in formula
    assert text_of("git", "-C", ROOT, "rev-parse", "--short=10", "HEAD").strip() in formula
    assert 'run [opt_bin/"vllm-mlx", "service", "run"]' in formula
    assert f"throttle_interval {THROTTLE_S}" in formula
