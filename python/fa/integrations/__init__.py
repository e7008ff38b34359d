# SPDX-License-Identifier: BSD-3-Clause
# Which frameworks can call fa by their own means? One file each; nothing is imported before asked.
"""Adapters to other frameworks."""
