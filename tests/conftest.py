# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from testing.clockwork.harness import Harness


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The process that vLLM engines are forked from: vLLM is imported once for the whole run."""
    with Harness(tmp_path_factory.mktemp("engines")) as shared:
        yield shared
