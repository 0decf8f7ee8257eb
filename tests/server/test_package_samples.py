"""The samples of the READMEs of client packages: the list is complete, and those of the locked packages run."""

import sys
from importlib.metadata import metadata, version
from pathlib import Path

import pytest

from scripts._accept_clients.packages import MODELS, PACKAGES, Package, Program, blocks, programs
from scripts._accept_clients.samples import run_sample
from tests.support.commands import address, served
from tests.support.running import serving

from .fakes import FakeEngine

LOCKED = [package for package in PACKAGES if package.name in ("openai", "anthropic")]  # the tests have these
_LIMIT_S = 60.0


def readme_of(package: Package) -> str:
    return str(metadata(package.name).get_payload())  # type: ignore[attr-defined]


def listed(package: Package) -> list[Program]:
    if version(package.name) != package.version:
        pytest.skip(f"the list is for {package.spec}, and {version(package.name)} is installed")
    return list(programs(package, readme_of(package)))


def test_blocks_are_those_of_python_with_their_headings() -> None:
    readme = "# A\n```sh\n# no heading\n```\n```python\nx = 1\n```\n## B\n  ```py title\ny\n  ```\n```\nz\n```\n"
    assert [(block.heading, block.code) for block in blocks(readme)] == [("A", "x = 1\n"), ("B", "y\n")]


@pytest.mark.parametrize("package", LOCKED, ids=lambda package: package.name)
def test_the_list_has_every_block_of_the_readme(package: Package) -> None:
    found = listed(package)
    assert sorted(package.samples) == list(range(1, len(blocks(readme_of(package))) + 1))
    assert found and all(why for why in package.samples.values())
    with pytest.raises(KeyError, match="its README has"):
        list(programs(package, readme_of(package) + "\n```python\nnew()\n```\n"))


@pytest.mark.parametrize("package", LOCKED, ids=lambda package: package.name)
def test_the_first_sample_runs_as_it_is(package: Package) -> None:
    with serving(FakeEngine(), served_model_names=MODELS) as server:
        ran = run_sample(listed(package)[0], Path(sys.executable), server.url, _LIMIT_S)
    assert ran.is_accepted, ran.output
    assert ran.output.strip()


def test_a_sample_that_fails_is_not_accepted() -> None:
    with serving(FakeEngine(), served_model_names=("other",)) as server:
        ran = run_sample(listed(LOCKED[0])[0], Path(sys.executable), server.url, _LIMIT_S)
    assert not ran.is_accepted and "does not exist" in ran.output


@pytest.mark.full
def test_every_listed_sample_runs_on_the_demo(tmp_path: Path) -> None:
    names = [word for name in MODELS for word in ("--served-model-name", name)]
    failed = []
    with served("--max-tokens", "64", *names, HOME=str(tmp_path)) as (_, printed):
        for package in LOCKED:
            for program in listed(package):
                if "DefaultAioHttpClient" not in program.parts[-1]:  # an extra that the tests do not install
                    ran = run_sample(program, Path(sys.executable), address(printed), _LIMIT_S)
                    failed += [] if ran.is_accepted else [(program.sample, ran.output[-500:])]
    assert failed == []
