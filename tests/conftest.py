# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests, and how many examples the properties try."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from testing.clockwork.harness import Harness

# Deadlines say more of the machine than of the code. `--hypothesis-profile=long` takes another one. Guards
# take the last, which tries the same each time and does not look for the shortest example of what fails.
settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
GENERATE = [Phase.explicit, Phase.generate]
settings.register_profile("guards", deadline=None, derandomize=True, database=None, phases=GENERATE)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The process that vLLM engines are forked from: vLLM is imported once for the whole run."""
    with Harness(tmp_path_factory.mktemp("engines")) as shared:
        yield shared
