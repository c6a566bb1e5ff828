# SPDX-License-Identifier: Apache-2.0
"""Models, and the pair that most tests share."""

import pytest

from pairs.kit import Pair, Side, settle
from testing.clockwork import checkpoint
from testing.clockwork.clock import Clock
from testing.engines import launch
from testing.node import Node

WAIT = 240
CALM = {"lease": 10, "connect_timeout": 8, "link_silence": 60}
"""Leases that tests can wait for; no link is given up because the machine has much else to do."""


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """Four layers of full attention, 2 KV heads x 64, bf16."""
    return checkpoint.write(tmp_path_factory.mktemp("models") / "plain", checkpoint.Geometry())


@pytest.fixture(scope="package")
def nodes(tmp_path_factory):
    """Two daemons that nobody kills."""
    folder = tmp_path_factory.mktemp("nodes")
    with Node("a", folder, **CALM) as a, Node("b", folder, **CALM) as b:
        yield a, b


@pytest.fixture(scope="package")
def shared_pair(harness, nodes, model):
    """P on node a, D on node b, both with prefix caching."""
    a, b = nodes
    with (
        launch(harness, "P", "kv_producer", a, model, enable_prefix_caching=True) as p,
        launch(harness, "D", "kv_consumer", b, model, enable_prefix_caching=True) as d,
    ):
        p.ready(WAIT)
        d.ready(WAIT)
        yield Pair(Side(p, a), Side(d, b))


@pytest.fixture
def pair(shared_pair):
    """The shared pair: as fast as it goes, and after each test everything is back."""
    yield shared_pair
    shared_pair.p.engine.set_clock(Clock())
    shared_pair.d.engine.set_clock(Clock())
    settle(shared_pair.p, shared_pair.d)
