# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with the clockwork model: kvpushd beside vLLM's own connectors."""
