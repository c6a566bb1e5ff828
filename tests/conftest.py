# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests, and how many examples the properties try."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from testing.clockwork.harness import Harness

# Deadlines say more of the machine than of the code. `--hypothesis-profile=long` takes the other one.
settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The process that vLLM engines are forked from: vLLM is imported once for the whole run."""
    with Harness(tmp_path_factory.mktemp("engines")) as shared:
        yield shared
