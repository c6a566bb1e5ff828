# SPDX-License-Identifier: Apache-2.0
"""The wire part: bytes per second, and what a gigabyte costs in CPU."""
