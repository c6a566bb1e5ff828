# SPDX-License-Identifier: Apache-2.0
"""The doors of a daemon: a module for each kind of listener."""
