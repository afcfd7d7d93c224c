"""Cost of exchanging one layer by each route, in seconds. Pure functions.

The link's part, and what is computed for it: before (in the thread of the backward pass), after (where the exchange
ends), and what the backward pass saves. One code prices a plan for a run under way and one on paper.
"""

from __future__ import annotations

import dataclasses

from commlib.exchange.factors.delivery import BlockShares
from commlib.exchange.factors.rounds import WORD
from commlib.messaging.link_model import Link


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Cost of one layer by one route.

    Args:
        route: what it is called: ``dense``, ``factors``, or a codec's spec.
        sent: bytes a rank sends.
        link_s: seconds that its bytes (and collectives of its own) occupy the link.
        late_s: those of them for what leaves with its bucket all the same, if it is early.
        shared_s: seconds for each collective it shares with the layers of its bucket that take the same route.
        before_s: of arithmetic in the backward pass, when its bucket is ready (compression).
        after_s: of arithmetic once it has come through (decompression, the product of factors).
        saved_s: of the backward pass that need not be computed.
        early: it leaves when the layer's backward pass begins, and not with its bucket.
    """

    route: str
    sent: float
    link_s: float
    shared_s: float
    before_s: float = 0.0
    after_s: float = 0.0
    saved_s: float = 0.0
    early: bool = False
    late_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds it costs if nothing overlaps."""
        return self.link_s + self.before_s + self.after_s - self.saved_s


def dense(nbytes: int, link: Link) -> Candidate:
    """An all-reduce of the gradient; ``nbytes`` of it."""
    sent = 2 * (link.world - 1) / link.world * nbytes
    return Candidate("dense", sent, link.all_reduce.beta * sent, link.all_reduce.alpha)


def factors(
    n: int,
    m: int,
    rows: int,
    link: Link,
    *,
    local_s: float,
    rebuild_s: float,
    itemsize: int = 4,
    route: str = "factors",
    payload: int | None = None,
    before_s: float = 0.0,
) -> Candidate:
    """Rows of a linear layer to all ranks, and one product there (Xie et al., UAI 2016).

    Args:
        n: outputs of the layer.
        m: inputs.
        rows: K of a rank, those that there is room for.
        link: all ranks' common one.
        local_s: seconds of the weight gradient from K rows, which is not computed then.
        rebuild_s: seconds of the product over all ranks' P·K rows, and to decompress them.
        itemsize: bytes of a value of the rows.
        route: its name.
        payload: bytes of a rank's rows, if they are compressed.
        before_s: seconds to compress them.
    """
    sent = (link.world - 1) * (WORD + (rows * (n + m) * itemsize if payload is None else payload))
    words = link.all_gather.alpha  # of the ranks' rows, once for a bucket
    wire = link.all_gather.seconds(sent)
    return Candidate(route, sent, wire, words, before_s, after_s=rebuild_s, saved_s=local_s, early=True)


def owners_sent(n: int, m: int, rows: int, world: int, itemsize: int = 4) -> tuple[int, int]:
    """Bytes of rows and of blocks that a rank sends at most: all blocks as long as the longest."""
    shares = BlockShares(n, m, world)
    values = rows * (min(n, m) + shares.longest)
    return (world - 1) * (WORD + values * itemsize), (world - 1) * shares.largest * itemsize


def owners(n: int, m: int, rows: int, link: Link, *, local_s: float, itemsize: int = 4) -> Candidate:
    """Rows of a linear layer to whom its blocks belong, and the blocks to all (Adam, OSDI 2014; arXiv 1512.06216).

    What goes directly is priced as what goes around a ring. A rank's block of all ranks' product is as many FLOPs as
    the product of its own rows, which it saves. Blocks leave when that is done: here, with their bucket, and the
    product follows them; alone, the sum is the same.

    Args:
        n: outputs of the layer.
        m: inputs.
        rows: K of a rank, those that there is room for.
        link: all ranks' common one.
        local_s: seconds of the weight gradient from K rows.
        itemsize: bytes of a value of rows and gradient.
    """
    early, late = owners_sent(n, m, rows, link.world, itemsize)
    late_s = link.all_gather.beta * late
    shared = 2 * link.all_gather.alpha  # words, as for factors, and blocks; once for a bucket
    seconds = link.all_gather.seconds(early) + late_s
    return Candidate(
        "owners", early + late, seconds, shared, after_s=local_s, saved_s=local_s, early=True, late_s=late_s
    )


def push_pull(sent: int, link: Link, *, plain: int = 0) -> Candidate:
    """Gradients to servers, and their mean back.

    Args:
        sent: bytes of those that go there.
        link: all ranks' common one, with a line to the servers.
        plain: bytes of gradients beside them that stay dense, by an all-reduce of their own.

    Raises:
        ValueError: nobody has measured the way to the servers.
    """
    if link.push_pull is None:
        raise ValueError("the way to the servers was not measured")
    beside = dense(plain, link)
    shared = link.push_pull.alpha + (beside.shared_s if plain else 0.0)
    return Candidate("push_pull", sent + beside.sent, link.push_pull.beta * sent + beside.link_s, shared)


def compressed(
    route: str,
    sent: float,
    link: Link,
    *,
    gathers: int,
    reduces: int,
    before_s: float,
    after_s: float,
    plain: int = 0,
) -> Candidate:
    """A payload by so many all-gathers (or all-to-alls) and all-reduces, which its bucket shares.

    Args:
        route: its name.
        sent: bytes of payloads a rank sends.
        link: all ranks' common one.
        gathers: collectives by which payloads come together.
        reduces: those by which they are summed.
        before_s: seconds to compress.
        after_s: seconds to decompress, and of all else that follows the first collective.
        plain: bytes of gradients that go with it uncompressed.
    """
    shared = gathers * link.all_gather.alpha + reduces * link.all_reduce.alpha
    beta = link.all_gather.beta if gathers else link.all_reduce.beta
    beside = dense(plain, link)
    return Candidate(route, sent + beside.sent, beta * sent + beside.link_s, shared, before_s=before_s, after_s=after_s)
