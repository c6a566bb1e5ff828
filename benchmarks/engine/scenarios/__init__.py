# SPDX-License-Identifier: Apache-2.0
"""What is played. Each module has one scenario, which says what it measures and which goals it decides."""
