# SPDX-License-Identifier: Apache-2.0
"""A long run under mixed load: what is right stays right, and nothing grows.

`load` says what is asked, `fleet` has the processes, `drive` asks, `meters` says what grew.
"""
