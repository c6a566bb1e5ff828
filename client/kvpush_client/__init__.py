# SPDX-License-Identifier: Apache-2.0
"""What an engine imports to talk to the kvpushd of its node. No nixl, no uvloop.

`session.Session` is the way in; `events` is what it says, `layout` how an engine describes its pool.
"""
