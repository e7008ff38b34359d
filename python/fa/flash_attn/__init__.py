# SPDX-License-Identifier: BSD-3-Clause
# How does code that was written for the package flash_attn (FlashAttention-2) call fa?
"""The shape of FlashAttention-2's package: its functions, `flash_attn_interface`, `bert_padding`.

    from fa.flash_attn import flash_attn_func
    sys.modules["flash_attn"] = fa.flash_attn       # for code that imports the package by name

`__version__` is the version whose signatures these are.
"""

from __future__ import annotations

from fa.flash_attn import bert_padding, flash_attn_interface
from fa.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
