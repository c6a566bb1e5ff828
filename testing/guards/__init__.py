# SPDX-License-Identifier: Apache-2.0
"""Takes the guards out of a copy of the tree, one at a time, and sees that a test notices."""
