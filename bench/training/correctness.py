"""Whether a route did its work: what is looked at after a visit, and the rule by which it is judged.

With a real model the ranks' loss on examples nobody trained on, the same on all ranks, before the first step and
after the last:

- the replicas must agree (to 1e-4): a route that gives each rank another gradient lets them drift apart;
- with plain DDP (or plain FSDP2, where that is the baseline) it must have fallen;
- with an exact route it must equal the baseline's (to 1e-5, or to thrice what that one's own visits differ by);
- with a lossy route it must have fallen by a tenth of what the baseline's fell by.

With a simulated one there is no loss, but the mean of the ranks' gradients is known. What the route delivered,

- must be the same on all ranks;
- by an exact route must be that mean (relative error 1e-5, every step);
- by a lossy one, averaged over the steps, must point the mean's way: its projection on it between 0 and 1.5
  times its length. (Error feedback delivers late; a sum instead of a mean would be at the number of ranks.)
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

AGREE, EQUAL, OWN_NOISE = 1e-4, 1e-5, 3.0
SHARE_OF_PROGRESS = 0.1
MOST_DELIVERED = 1.5


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Evidence of one trial. None: not looked at, as the model is real, or simulated.

    Args:
        apart: largest difference between two ranks, relative to the size of what was compared.
        first, last: the loss before and after, mean over the ranks.
        off: relative error of the delivered mean gradient, of the worst step.
        share: projection of what was delivered on the true mean gradient, 1 is all of it.
    """

    apart: float
    first: float | None = None
    last: float | None = None
    off: float | None = None
    share: float | None = None


def judge(own: Sequence[Evidence], reference: Sequence[Evidence], *, exact: bool) -> bool | None:
    """Whether a route did what it must in every visit; None if that cannot be said.

    Args:
        own: of its visits.
        reference: of the baseline's, plain DDP or FSDP2.
        exact: whether it claims to hand over the mean gradient itself.
    """
    if not own or not reference:
        return None
    if own[0].last is None:
        return all(e.apart <= AGREE and _delivered(e, exact) for e in own)
    losses = [_loss(e) for e in reference]
    noise = max(losses) - min(losses)
    before, after = reference[0].first or math.nan, statistics.median(losses)
    if not all(e.apart <= AGREE and math.isfinite(_loss(e)) for e in own):
        return False
    if exact:
        same = all(abs(_loss(e) - after) <= max(EQUAL * abs(after), OWN_NOISE * noise) for e in own)
        return same and after < before
    if not after < before:
        return None  # the reference learned nothing to compare with
    return all(before - _loss(e) >= SHARE_OF_PROGRESS * (before - after) for e in own)


def _delivered(e: Evidence, exact: bool) -> bool:
    if exact:
        return e.off is not None and e.off <= EQUAL
    return e.share is not None and 0 < e.share <= MOST_DELIVERED


def _loss(e: Evidence) -> float:
    return math.nan if e.last is None else e.last
