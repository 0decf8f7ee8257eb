"""Files stay small enough to be read in one sitting."""

import re
from pathlib import Path

import pytest

from tests.project.sources import ROOT, python_files

MAX_LINES = 400


@pytest.mark.parametrize("file", python_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_exceeds_400_lines(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in python_files()
        if (text := file.read_text(encoding="utf-8")).strip() and not re.match(r'(#!.*\n)?"""', text)
    ]
    assert silent == []
