"""The faults that ``make test-mutants`` puts in: by hand, and those that were there once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

KINDS = ("sign", "off by one", "order")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        file: from the repository's root.
        old: what is there, once.
        new: what stands there instead.
        kind: of :data:`KINDS`, or ``returned``.
        caught_by: pytest's name of the test that fails then.
    """

    file: str
    old: str
    new: str
    kind: Literal["sign", "off by one", "order", "returned"]
    caught_by: str


def swapped(file: str, first: str, second: str, caught_by: str) -> Mutant:
    """Two blocks of statements that follow each other, in the wrong order."""
    return Mutant(file, first + second, second + first, "order", caught_by)


MUTANTS: Sequence[Mutant] = (
    Mutant(
        "commlib/exchange/sequencer.py",
        "streams.accelerator(result.device) is not None or self._failed is not None:",
        "streams.accelerator(result.device) is not None or self._failed is None:",
        "sign",
        "tests/commlib/exchange/test_sequencer.py::test_after_giving_up_no_bucket_is_issued_by_any_way",
    ),
    Mutant(
        "commlib/exchange/sequencer.py",
        "self._advance(trip, lane)",
        "self._advance(trip, lane - 1)",
        "off by one",
        "tests/commlib/exchange/test_sequencer.py::test_every_round_goes_over_the_group_of_that_round_and_buckets_in_order_in_each",
    ),
    Mutant(
        "commlib/exchange/sequencer.py",
        "self._failed = self._failed or error",
        "self._failed = error or self._failed",
        "order",
        "tests/commlib/exchange/test_sequencer.py::test_the_first_reason_to_give_up_stays_the_one",
    ),
    Mutant(
        "commlib/codecs/error_feedback.py",
        "Carry(old if self.decay == 1 else",
        "Carry(old if self.decay != 1 else",
        "sign",
        "tests/commlib/codecs/test_error_feedback.py::test_what_was_held_back_fades_by_the_decay_in_every_step",
    ),
    Mutant(
        "commlib/codecs/error_feedback.py",
        "inner = self.inner.at(step)",
        "inner = self.inner.at(step + 1)",
        "off by one",
        "tests/commlib/codecs/test_error_feedback.py::test_at_a_step_the_codec_inside_is_that_of_the_same_step",
    ),
    Mutant(
        "commlib/codecs/error_feedback.py",
        'old, new = memory.old["residual"], memory.new["residual"]',
        'old, new = memory.new["residual"], memory.old["residual"]',
        "order",
        "tests/commlib/codecs/test_error_feedback.py::test_a_step_writes_beside_the_residual_that_it_reads_so_that_it_can_be_forgotten",
    ),
    Mutant(
        "commlib/codecs/memory_store.py",
        "add_(value, alpha=times)",
        "add_(value, alpha=-times)",
        "sign",
        "tests/commlib/codecs/test_drain.py::test_a_stripe_counts_as_often_as_there_are_ranks",
    ),
    Mutant(
        "commlib/codecs/memory_store.py",
        "or not 0 < unit <",
        "or not 0 <= unit <",
        "off by one",
        "tests/commlib/codecs/test_memory_store.py::test_a_loss_scale_that_is_none_leaves_what_is_held_back_alone",
    ),
    Mutant(
        "commlib/codecs/memory_store.py",
        """\
        self._committed = self._pending
        self.discard()

    def undo\
""",
        """\
        self.discard()
        self._committed = self._pending

    def undo\
""",
        "order",
        "tests/commlib/codecs/test_drain.py::test_a_step_that_does_not_count_has_drained_nothing[undone]",
    ),
    Mutant(
        "commlib/groups/handshake.py",
        'if not store.check([f"{key}/self/{world.rank}"]):',
        'if store.check([f"{key}/self/{world.rank}"]):',
        "sign",
        "tests/commlib/groups/test_handshake.py::test_a_rank_that_fails_before_it_has_said_anything_is_heard_by_those_who_wait_for_it",
    ),
    Mutant(
        "commlib/groups/handshake.py",
        "for other in range(world.size):",
        "for other in range(1, world.size):",
        "off by one",
        "tests/commlib/groups/test_handshake.py::test_every_rank_hears_that_one_differs_whichever_it_is",
    ),
    Mutant(
        "commlib/groups/handshake.py",
        """\
        if store.check([f"{key}/called"]):
            store.set(f"{key}/{world.rank}", b"here")
""",
        """\
        store.set(f"{key}/{world.rank}", b"here")
        if store.check([f"{key}/called"]):
""",
        "order",
        "tests/commlib/groups/test_handshake.py::test_who_has_waited_before_anybody_called_has_not_answered_the_call",
    ),
    Mutant(
        "commlib/exchange/factors/rounds.py",
        "(size - 1) * WORD < summed",
        "(size - 1) * WORD > summed",
        "sign",
        "tests/commlib/exchange/factors/test_rounds.py::test_rows_go_again_only_while_that_takes_fewer_bytes_than_the_matrices",
    ),
    Mutant(
        "commlib/exchange/factors/rounds.py",
        "self.count <= self._room.rows and",
        "self.count < self._room.rows and",
        "off by one",
        "tests/commlib/exchange/factors/test_rounds.py::test_rows_that_just_fill_the_room_arrive_in_the_first_round",
    ),
    swapped(
        "commlib/exchange/factors/rounds.py",
        """\
        if most <= self._room.rows and all(d == self._room.dtype for d in dtypes):
            return "gathered"
""",
        """\
        if worth:
            self._next = RowCapacity(most, dtype)
            return "again"
""",
        "tests/commlib/exchange/factors/test_rounds.py::test_rows_that_just_fill_the_room_arrive_in_the_first_round",
    ),
    Mutant(
        "commlib/planning/manager/controller.py",
        "max(f.wire, ref.wire) > _WIRE_SHARE",
        "max(f.wire, ref.wire) < _WIRE_SHARE",
        "sign",
        "tests/commlib/planning/manager/test_controller.py::test_when_the_link_changes_the_plan_follows_within_fifty_steps_and_says_so",
    ),
    Mutant(
        "commlib/planning/manager/controller.py",
        "if len(self._ratios) < _ROUNDS and",
        "if len(self._ratios) <= _ROUNDS and",
        "off by one",
        "tests/commlib/planning/manager/test_controller.py::test_a_plan_that_wins_by_little_does_so_in_three_rounds_and_no_more",
    ),
    swapped(
        "commlib/planning/manager/controller.py",
        """\
        if len(self._ratios) == 1:  # what came before it may have been the first steps of all, which take longer
            self._ratios[0] *= self._known.dense.span / f.span
""",
        """\
        self._known.dense_steps(f, watched=False)
""",
        "tests/commlib/planning/manager/test_controller.py::test_the_round_after_the_first_steps_of_all_counts_by_the_dense_steps_that_came_then",
    ),
    Mutant(
        "commlib/server/shard/shard.py",
        "all(n >= owed[0].number for n in",
        "all(n <= owed[0].number for n in",
        "sign",
        "tests/commlib/server/shard/test_shard.py::test_an_acknowledgement_waits_for_every_replica",
    ),
    Mutant(
        "commlib/server/shard/shard.py",
        "_Owed(each.number + 1, [(worker, ack)])",
        "_Owed(each.number, [(worker, ack)])",
        "off by one",
        "tests/commlib/server/shard/test_shard.py::test_an_acknowledgement_waits_for_every_replica",
    ),
    Mutant(
        "commlib/server/shard/shard.py",
        "return sends + [send for message in early for send in self.handle(message)]",
        "return [send for message in early for send in self.handle(message)] + sends",
        "order",
        "tests/commlib/server/shard/test_shard.py::test_replicas_are_told_all_before_what_came_early_is_sent_on",
    ),
    Mutant(
        "commlib/messaging/frame.py",
        "if frame.dtype and not frame.codec:",
        "if frame.dtype and frame.codec:",
        "sign",
        "tests/commlib/messaging/test_frame.py::test_what_is_no_frame_is_refused_in_words_that_say_why",
    ),
    Mutant(
        "commlib/messaging/frame.py",
        "if nbytes > limits.nbytes:",
        "if nbytes >= limits.nbytes:",
        "off by one",
        "tests/commlib/messaging/test_frame.py::test_limits_hold_to_the_byte",
    ),
    swapped(
        "commlib/messaging/frame.py",
        """\
    if len(start) == len(MAGIC) or start[-1] != VERSION:
        found = start[len(MAGIC) :].hex() or "none"
        raise ProtocolError(f"version {found} of the wire format, this is {VERSION:02x}: install the same commlib")
""",
        """\
    try:
        check_nesting(rest, depth=2, items=most)
        values = msgpack.unpackb(rest, max_array_len=most, max_ext_len=0, max_map_len=0, max_bin_len=0)
    except ProtocolError as e:
        raise ProtocolError(f"a header that cannot be read: {e}") from None
    except Exception as e:  # msgpack raises ValueError, its own and others; of bytes all mean the same
        raise ProtocolError(f"a header that cannot be read ({type(e).__name__}); it may be cut off") from None
""",
        "tests/commlib/messaging/test_frame.py::test_what_is_no_frame_is_refused_in_words_that_say_why",
    ),
    Mutant(
        "transports/process_group/engine.py",
        "if not isinstance(error, CommlibError):",
        "if isinstance(error, CommlibError):",
        "sign",
        "tests/transports/process_group/test_failures.py::test_all_calls_behind_one_that_failed_fail_for_its_reason_even_once_the_group_is_gone",
    ),
    Mutant(
        "transports/process_group/engine.py",
        "for each in (call, *left) if",
        "for each in (call, *left[1:]) if",
        "off by one",
        "tests/transports/process_group/test_failures.py::test_all_calls_behind_one_that_failed_fail_for_its_reason_even_once_the_group_is_gone",
    ),
    Mutant(
        "transports/process_group/engine.py",
        """\
            self._closed = True
            self._error = self._error or error
""",
        """\
            self._closed = True
            self._error = error or self._error
""",
        "order",
        "tests/transports/process_group/test_failures.py::test_all_calls_behind_one_that_failed_fail_for_its_reason_even_once_the_group_is_gone",
    ),
    Mutant(
        "commlib/checkpoint/state_dict.py",
        "elif not same:",
        "elif same:",
        "sign",
        "tests/commlib/checkpoint/test_state_dict_fits.py::test_after_a_change_of_routes_a_basis_is_left_out_that_the_routes_here_do_not_know",
    ),
    Mutant(
        "commlib/checkpoint/state_dict.py",
        '("", 1 / len(old))',
        '("", 1 / (len(old) + 1))',
        "off by one",
        "tests/commlib/checkpoint/test_state_form.py::test_residuals_of_two_ranks_become_their_mean_on_one",
    ),
    swapped(
        "commlib/checkpoint/state_dict.py",
        """\
    rows = sorted({name for name, *_ in found if plan.layers[name].spec.sparse})
    if rows:
        raise CheckpointMismatch(
            f"the checkpoint holds back gradient of {rows[0]}, which is sparse here and has no fixed shape: send "
            "it first (swap to 'none', and one step), or load with drop_residuals=True"
        )
""",
        "    store.clear()\n",
        "tests/commlib/checkpoint/test_state_dict_fits.py::test_a_state_that_is_refused_has_changed_nothing",
    ),
    Mutant(
        "commlib/fsdp/gradients.py",
        "] += late[stripe.start : stripe.stop].flatten()",
        "] -= late[stripe.start : stripe.stop].flatten()",
        "sign",
        "tests/commlib/fsdp/test_gradients.py::test_what_earlier_routes_have_held_back_is_added_where_the_owners_of_its_rows_get_it",
    ),
    Mutant(
        "commlib/fsdp/gradients.py",
        "reduce_scatter.chunks(spec, self._shard.size)[0].spec",
        "reduce_scatter.chunks(spec, self._shard.size)[-1].spec",
        "off by one",
        "tests/commlib/fsdp/test_gradients.py::test_each_rank_finds_its_rows_of_every_layer_behind_what_pads_those_before",
    ),
    swapped(
        "commlib/fsdp/gradients.py",
        "            memory = self._store.memory(spec, codec.slots(part.spec), prefix=part.prefix, start=part.start)\n",
        """\
            if self._store.holds(name):
                late = torch.zeros(spec.shape, dtype=torch.float32, device=unit.inner.device)
                self._store.drain(spec, late, world.size, replicas.inter.size)
                grad += late[part.start : part.start + part.spec.shape[0]].flatten()
""",
        "tests/commlib/fsdp/test_gradients.py::test_between_replicas_a_route_takes_its_own_residual_over_and_it_is_not_added_to_the_gradient_too",
    ),
    Mutant(
        "commlib/local_sgd/outer_optimizers.py",
        "own.add_(delta, alpha=self._alpha(world))",
        "own.sub_(delta, alpha=self._alpha(world))",
        "sign",
        "tests/commlib/local_sgd/test_outer_optimizers.py::test_pulls_conserve_the_sum_of_all_values_and_the_centre_and_bring_ranks_nearer",
    ),
    Mutant(
        "commlib/local_sgd/outer_optimizers.py",
        "* (world + 1) >= 2:",
        "* (world + 1) > 2:",
        "off by one",
        "tests/commlib/local_sgd/test_outer_optimizers.py::test_pulls_that_would_swing_ever_further_are_refused_and_do",
    ),
    Mutant(
        "commlib/local_sgd/outer_optimizers.py",
        'slots["momentum"].mul_(self.momentum).add_(mean)',
        'slots["momentum"].add_(mean).mul_(self.momentum)',
        "order",
        "tests/commlib/local_sgd/test_outer_optimizers.py::test_the_outer_step_is_torchs_sgd_with_nesterov_on_the_mean_difference",
    ),
)


RETURNED: Sequence[Mutant] = (
    Mutant(
        "commlib/groups/store.py",
        "wait([future], answer_s / _PARTS)[0]",
        "wait([future])[0]",
        "returned",
        "tests/commlib/groups/test_store.py::test_a_store_that_stands_still_is_said_to_be_silent_and_nobody_waits_for_it_twice",
    ),
    Mutant(
        "commlib/exchange/step_check.py",
        'store_of(self._group).set(self._at("asked"), b"")\n            self._compare(doing, why, meanwhile)',
        "pass",
        "returned",
        "tests/integration/test_step_counts.py::test_a_state_that_one_rank_loads_alone_is_an_error_on_all_ranks_and_leaves_the_group_usable",
    ),
    Mutant(
        "commlib/checkpoint/collector.py",
        "(state,) = values.unpack(read[:head], read[head:])",
        'state = __import__("pickle").loads(read)',
        "returned",
        "tests/commlib/checkpoint/test_collector.py::test_nothing_that_a_rank_sends_is_run_or_room_made_for_by_another",
    ),
    Mutant(
        "commlib/server/shard/chunk_state.py",
        "if not like(value, made := self._made_with[name]):",
        "if not like(made := self._made_with[name], made):",
        "returned",
        "tests/commlib/server/shard/test_chunk_state.py::test_an_option_that_no_such_optimizer_can_have_is_refused_and_the_others_go_on",
    ),
    Mutant(
        "commlib/messaging/nesting.py",
        "if len(left) > depth:",
        "if len(left) > 100 * depth:",
        "returned",
        "tests/commlib/messaging/test_nesting.py::test_lists_in_lists_pass_to_the_last_level_that_is_allowed",
    ),
    Mutant(
        "transports/process_group/rendezvous.py",
        '"secret": secret,',
        '"secret": "",',
        "returned",
        "tests/transports/process_group/test_security.py::test_without_keys_who_does_not_know_the_groups_secret_is_refused_in_the_handshake",
    ),
    Mutant(
        "commlib/runtime/exit.py",
        "        try:\n            close()",
        "        try:\n            close",
        "returned",
        "tests/commlib/runtime/test_exit.py::test_what_is_alive_at_the_end_is_closed_newest_first_whatever_goes_wrong",
    ),
    Mutant(
        "commlib/checkpoint/state_form.py",
        "_demand(bool(value.isfinite().all()), where",
        "_demand(True, where",
        "returned",
        "tests/commlib/checkpoint/test_state_form.py::test_what_is_damaged_is_named_by_its_key_and_changes_nothing",
    ),
    Mutant(
        "commlib/messaging/keys.py",
        "(stat.S_IWGRP | stat.S_IWOTH) and not kept:",
        "(stat.S_IWGRP | stat.S_IWOTH) and kept:",
        "returned",
        "tests/commlib/messaging/test_keys.py::test_a_list_that_others_may_change_is_not_used",
    ),
    Mutant(
        "transports/zeromq_monitor.py",
        "    except ConnectionRefusedError:\n        return True",
        "    except ConnectionRefusedError:\n        return False",
        "returned",
        "tests/transports/test_zeromq.py::test_a_peer_that_died_is_named_long_before_the_deadline",
    ),
    Mutant(
        "commlib/groups/handshake.py",
        'knows = hasattr(group, "peers_gone")',
        "knows = False",
        "returned",
        "tests/commlib/groups/test_handshake.py::test_a_rank_that_the_group_knows_to_be_gone_is_not_waited_for_unless_it_has_said_its_word",
    ),
    Mutant(
        "transports/process_group/engine.py",
        "if told and not self._idle and not self._closed:",
        "if told and self._idle and not self._closed:",
        "returned",
        "tests/transports/process_group/test_futures.py::test_a_callback_may_wait_for_a_later_call_whose_callback_waits_too",
    ),
)
"""Faults that an attack found in November 2026, of each kind one: as it was, or as near to that as the code allows.

One is for the full tier: that memory which a probe took is not given back is seen by ``test_soak.py``."""
