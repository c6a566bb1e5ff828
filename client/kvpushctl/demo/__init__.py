# SPDX-License-Identifier: Apache-2.0
"""`kvpushctl demo`: a whole fleet on this host, for a minute or two."""
