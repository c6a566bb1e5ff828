# SPDX-License-Identifier: Apache-2.0
"""Faults at the daemon's, the mover's and the client's every message and transport call, by a test's rules.

The production code knows nothing of it: entry points of a test build wrap what it talks through
(`python -m testing.faults.daemon`, `session.FaultySession`, `connector.FaultyConnector`). A process of a
test build finds its rules in a folder, the board, which the environment variable KVPUSH_FAULTS names;
`board.Board` is the test's side of it, `points.Points` the process's, `catalog` says which points there are.
"""
