# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector: the only place that says P (prefill) and D (decode).

vLLM loads `plugin` in each of its processes. `connector` hands vLLM's hooks to one of two sides: `scheduler`,
with `receiver` (D) and `sender` (P), or `worker`. `start` brings both up; the rest are pure parts of these.
"""
