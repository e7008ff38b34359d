# SPDX-License-Identifier: BSD-3-Clause
# How may DTensor split a call over a mesh, without any communication?
"""Sharding rules for DTensor: along the batch and along the heads.

Registered when the first DTensor arrives, for torch.distributed.tensor is slow to import. Sharded
sequences need partial results and `fa.combine`, which is the caller's decision, not a rule's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_INDEX = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx")
_registered = False


def notice(t: object) -> None:
    """Registers the rules if `t` is a DTensor."""
    if not _registered and type(t).__name__ == "DTensor":
        register()


def register() -> None:
    """Needs torch.distributed.tensor; does nothing the second time."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.fa._forward.default)(_forward)
    register_sharding(torch.ops.fa.backward.default)(_backward)
    _registered = True


def if_loaded() -> None:
    """At import: a program that uses DTensor already gets the rules at once."""
    if "torch.distributed.tensor" in sys.modules:
        register()


def refuse(options: dict[str, Any]) -> int:
    """NotImplementedError for an option that is a DTensor in a place no rule knows.

    Asked before each call and not by the rules alone: DTensor of torch 2.11 remembers what they
    chose without regard to keyword arguments. Returns how many options are DTensors.
    """
    specs = {name: x for name, x in options.items() if hasattr(x, "placements")}
    for name, spec in specs.items():
        # DTensor does not redistribute keyword arguments, so a wrong placement would go unnoticed.
        if name not in _INDEX or not all(p.is_replicate() for p in spec.placements):
            raise NotImplementedError(
                f"{name}: a DTensor placed {list(spec.placements)}. With DTensors, index tensors "
                "must be replicated, and sinks, alibi_slopes and the gradient of lse are not "
                "supported. Call fa on the local tensors (torch.distributed.tensor.experimental."
                "local_map)."
            )
    return len(specs)


Rule = tuple[list[Any], list[Any]]  # placements of the results, of the arguments


def _forward(q: Any, k: Any, v: Any, **options: Any) -> list[Rule]:
    return [
        ([tensor, lse], [tensor] * 3 + [replicate] * count)
        for tensor, lse, replicate, count in _choices(q, k, options)
    ]


def _backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> list[Rule]:
    return [
        # dsinks is empty: sinks are refused below.
        ([tensor] * 3 + [replicate], [tensor] * 5 + [lse_placement] + [replicate] * count)
        for tensor, lse_placement, replicate, count in _choices(q, k, options)
    ]


def _choices(q: Any, k: Any, options: dict[str, Any]) -> list[tuple[Any, Any, Any, int]]:
    """(placement of q, k, v, out and gradients; of lse; Replicate; number of index tensors)."""
    from torch.distributed.tensor import Replicate, Shard

    replicate, count = Replicate(), refuse(options)
    choices = [(replicate, replicate, replicate, count)]
    heads = len(q.shape) - 2
    # Whole groups only: an uneven split would pair query heads with the wrong key heads.
    if k.shape[-2] % q.mesh.size() == 0:
        choices.append((Shard(heads), Shard(heads - 1), replicate, count))
    if not count and q.shape[0] % q.mesh.size() == 0:
        choices.append((Shard(0), Shard(0), replicate, count))
    return choices
