# SPDX-License-Identifier: Apache-2.0
"""What every part of the benchmark shares: samples, statistics, goals, and the report made of them."""
