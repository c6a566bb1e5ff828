# SPDX-License-Identifier: Apache-2.0
"""Movers that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mover_kit import Site


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site of the kind that the test is parametrized with: starting NIXL takes a second of CPU."""
    made = Site(request.param)
    yield made
    made.close()
