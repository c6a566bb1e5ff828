# SPDX-License-Identifier: Apache-2.0
"""Measurements: `python -m benchmarks` runs contenders side by side and writes a report."""
