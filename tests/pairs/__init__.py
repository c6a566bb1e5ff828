# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines over real daemons. A package, so that fixtures can live exactly as long as its tests."""
