# SPDX-License-Identifier: Apache-2.0
"""The clockwork witness: a vLLM model that waits instead of computing and checks every KV byte it reads.

`checkpoint` writes a model, `harness` runs engines with it (`engine` is one), and `chain.reference` says what
they must answer.
Importing this package imports no vLLM.
"""
