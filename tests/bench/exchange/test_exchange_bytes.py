"""The claim that everything rests on: what an exchange says it sends is what leaves the host.

    interface = socket + sent again + 66 bytes for each packet          (to the byte, but for TCP's options)
    socket    = accounted + at most 288 bytes for each message of Gloo

66 bytes are the headers of Ethernet (14), IPv4 (20) and TCP (20) with its timestamps (12); a packet is what was
sent, retransmissions and bare acknowledgements included. An acknowledgement that reports holes is up to 24
bytes longer. Full packets carry 1448 bytes, and at most each is acknowledged by one of 66.
"""

from __future__ import annotations

import pytest

from commlib.bench.exchange.combinations import BASELINE, Pair, choose
from commlib.bench.exchange.runner import measure
from commlib.bench.exchange.trial import ExchangeTrial, TrialSetting
from commlib.bench.exchange.worker import ExchangeJob
from commlib.bench.lab.network_commands import segment
from commlib.bench.targets import place
from commlib.codecs.registry import compressors
from commlib.exchange.registry import BY_ROWS, BY_SERVERS, EXCHANGES, OF_SPARSE

# 0.7 million values in two buckets; one layer is a vector that stays dense, and heights that do not divide.
LAYERS = [
    ("a.weight", (509, 512)),
    ("b.weight", (256, 1024)),
    ("c.weight", (127, 128, 3, 3)),
    ("c.bias", (300,)),
]
BUCKETS = 2
RATE = "150mbit"
HEADERS = 14 + 20 + 20 + 12
SACK = 24  # two blocks; with timestamps there is room for three
GLOO = 288  # a message's own head, and the notices by which the two sides agree that it may come
ROLL_CALL = 2000  # a second: a rank that waits long asks the store whether the others are alive


def explain(visit: ExchangeTrial) -> list[str]:
    """What is wrong with the bytes of a visit, in words."""
    world = len(visit.shares)
    wrong = []
    for rank, share in enumerate(visit.shares):
        assert share.sockets is not None
        # At most: an all-reduce of 2(P−1) turns for each round, and one for what stays dense, in each bucket.
        messages = 2 * (world - 1) * BUCKETS * (EXCHANGES[visit.pair.exchange].ROUNDS + 1) * visit.steps
        most = share.accounted + GLOO * messages + ROLL_CALL * sum(share.seconds)
        if not share.accounted <= share.sockets.sent <= most:
            wrong.append(f"{visit.pair} rank {rank}: {share.accounted} accounted, {share.sockets.sent} at the socket")
    return wrong


def at_interface(visit: ExchangeTrial) -> list[str]:
    """What is wrong with the frames of a visit, in words."""
    assert visit.interfaces is not None
    frames = visit.interfaces
    payload = sum(s.sockets.sent + s.sockets.resent for s in visit.shares if s.sockets is not None)
    left = frames.sent_bytes - payload - HEADERS * frames.sent_packets
    arp = 24 * 10 * len(visit.shares)  # a frame without IP and TCP is so much shorter
    if not -arp <= left <= SACK * frames.sent_packets:
        return [f"{visit.pair}: {payload} payload, {frames}: {left} bytes are not explained"]
    return []


@pytest.mark.alone
def test_the_line_on_which_bytes_are_counted_is_really_slow(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    with place(None, 4, RATE) as where:
        outcome, error = measure(where, ExchangeJob(TrialSetting(LAYERS, steps=1), [BASELINE], 1, 60.0, "gloo"))
    assert error is None
    assert outcome is not None
    assert outcome.line is not None
    assert 0.04 < outcome.line.gbit_s < 0.15  # on cores lent to others a line is slower, never faster


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_interface_counts_what_the_exchange_says_for_every_exchange_and_codec(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    pairs = choose(["all"]).pairs
    # some are made of rows, and here are only gradients; some need servers
    assert {p.exchange for p in pairs} == set(EXCHANGES) - set(BY_ROWS) - BY_SERVERS - OF_SPARSE
    assert {p.codec for p in pairs} == set(compressors())
    with place(None, 4, RATE) as where:
        outcome, error = measure(where, ExchangeJob(TrialSetting(LAYERS, steps=1), pairs, 1, 900.0, "gloo"))
    assert error is None
    assert outcome is not None
    assert [v.pair for v in outcome.visits] == pairs
    assert segment(150e6) < 2 * 1448  # it has room for one full packet only: what is counted are frames
    assert [x for v in outcome.visits for x in explain(v) + at_interface(v)] == []
    baseline = outcome.visits[0]
    assert baseline.pair == BASELINE
    assert baseline.interfaces is not None
    sent = sum(s.sockets.sent + s.sockets.resent for s in baseline.shares if s.sockets is not None)
    assert 1 + HEADERS / 1448 < baseline.interfaces.sent_bytes / sent < 1 + 2 * HEADERS / 1448 + 0.02


@pytest.mark.alone
def test_two_ranks_on_a_host_send_each_other_nothing_over_its_interface(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    with place(None, 2, "1gbit", 2) as where:
        outcome, error = measure(
            where, ExchangeJob(TrialSetting(LAYERS), [BASELINE, Pair("onebit", "scatter_gather")], 1, 20.0, "gloo")
        )
    assert error is None
    assert outcome is not None
    for visit in outcome.visits:
        assert explain(visit) == []
        assert visit.interfaces is not None
        sent = sum(s.sockets.sent for s in visit.shares if s.sockets is not None)
        assert 0.3 * sent < visit.interfaces.sent_bytes < 0.8 * sent  # a ring crosses with half of its links
