# SPDX-License-Identifier: Apache-2.0
"""The demo's own authority, and a certificate per node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """The three files of a node's [tls] table."""

    ca: Path
    cert: Path
    key: Path


def issue(folder: Path, nodes: list[str], host: str) -> dict[str, Certificates]:
    """A certificate for each node, good for its name and for `host`, signed by an authority made for it.

    The authority's key is never written.
    """
    import trustme

    authority = trustme.CA(organization_name="kvpush demo")
    ca = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    issued: dict[str, Certificates] = {}
    for node in nodes:
        files = Certificates(ca, folder / f"{node}.pem", folder / f"{node}.key")
        leaf = authority.issue_cert(node, host, common_name=node)
        for number, part in enumerate(leaf.cert_chain_pems):
            part.write_to_path(str(files.cert), append=number > 0)
        files.key.touch(mode=0o600)
        leaf.private_key_pem.write_to_path(str(files.key))
        issued[node] = files
    return issued
