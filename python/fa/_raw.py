# SPDX-License-Identifier: BSD-3-Clause
# How is the raw forward called with the least work on the host?
"""`raw`: the raw operator with the fewest arguments. Only for calls that nothing traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The C++ functions behind the operators, without the two Python frames around them. Set by `bind`,
# for this module is imported before the operators are defined.
_full: Any = None
_dense: Any = None
_DENSE_OPTIONS = frozenset(("softmax_scale", "causal", "window_left", "window_right"))


def bind() -> None:
    """Once the operators are defined."""
    global _full, _dense
    _full = torch.ops.fa._forward.default._op
    _dense = torch.ops.fa._forward_dense.default._op


def raw(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fa::_forward`; torch spends about 0.2 microseconds on each argument."""
    if _DENSE_OPTIONS.issuperset(options):
        get = options.get
        return _dense(
            q,
            k,
            v,
            get("softmax_scale"),
            get("causal", False),
            get("window_left", -1),
            get("window_right", -1),
        )
    return _full(q, k, v, **options)
