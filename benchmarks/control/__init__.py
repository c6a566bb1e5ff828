# SPDX-License-Identifier: Apache-2.0
"""What a transfer costs beside its bytes: messages, wakeups, and what grows with how much is held."""
