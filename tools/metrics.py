# SPDX-License-Identifier: Apache-2.0
"""Writes docs/metrics.md from the table in kvpushd/metrics.py."""

from pathlib import Path

from kvpushd.metrics import document

if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").write_text(document())
