# SPDX-License-Identifier: Apache-2.0
"""What ties the ledger to the world: who hears, and who carries its instructions out."""
