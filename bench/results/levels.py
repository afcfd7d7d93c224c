"""What became of ``--hierarchy``, in words."""

from __future__ import annotations

from commlib.planning.plan import Plan


def levels_of(plan: Plan) -> str:
    """``2 nodes of 2``; or that exchanges are flat, and why if a hierarchy was asked for."""
    if plan.local > 1:
        return f"{plan.world} nodes of {plan.local}"
    return plan.about.partition("hierarchy: ")[2].partition(";")[0] or "flat"
