# SPDX-License-Identifier: Apache-2.0
"""What an operator types: one module per noun."""
