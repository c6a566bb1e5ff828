# SPDX-License-Identifier: Apache-2.0
"""A small router in front of prefill and decode engines that dispatches both legs of a request at once."""
