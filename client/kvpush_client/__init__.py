# SPDX-License-Identifier: Apache-2.0
"""What an engine imports to talk to the kvpushd of its node. No nixl, no uvloop."""
