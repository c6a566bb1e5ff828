# SPDX-License-Identifier: Apache-2.0
"""What a process knows of its descriptors."""

from __future__ import annotations

import resource

import structlog

from kvpushd.node.descriptors import Descriptors


def test_to_be_out_of_descriptors_is_said_once_and_so_is_its_end() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as lines:
        found = Descriptors(structlog.get_logger())
        found.look()
        assert found.problem is None
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            found.look()
            found.look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert found.problem is not None
        assert "Too many open files" in found.problem
        found.look()
        found.look()
    assert found.problem is None
    assert [line["log_level"] for line in lines] == ["warning", "info"]
