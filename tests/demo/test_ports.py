# SPDX-License-Identifier: Apache-2.0
"""Ports that are chosen before they are listened on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvpushctl.demo import ports
from kvpushctl.demo.ports import free_port


def test_a_free_port_is_none_that_the_system_gives_to_connections() -> None:
    first, last = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port() for _ in range(200)}
    assert len(found) > 100
    assert not any(first <= port <= last for port in found)


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        leaves_two = tmp_path / "range"
        leaves_two.write_text(f"{port + 2}\t65535\n")
        monkeypatch.setattr(ports, "_EPHEMERAL", leaves_two)
        monkeypatch.setattr(ports, "_LOWEST", port)
        assert port not in {free_port() for _ in range(20)}


def test_a_host_that_gives_all_ports_to_connections_has_a_free_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    all_of_them = tmp_path / "range"
    all_of_them.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", all_of_them)
    assert 1024 <= free_port() <= 65535
