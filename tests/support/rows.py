"""Marks a test with the requirements that it holds: `@row("S1-10")`. tests/requirements.toml has their words."""

import pytest

row = pytest.mark.row
