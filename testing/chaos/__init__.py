# SPDX-License-Identifier: Apache-2.0
"""Seeded chaos: real processes killed, stopped and cut off at each phase of a transfer, and judged.

`scenario` says what happens, `stage` has the processes, `actor` plays one scenario, `account` judges.
"""
