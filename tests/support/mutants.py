"""The mutation check: faults put in by hand, one at a time, each of which a test of the fast tier has to catch.

In each of twelve core files a sign (or a condition) is wrong, a number is off by one, and an order is swapped. For
every mutant the package is copied with that one fault, and the one test that the table names is run against the copy:
it has to fail, and to pass without the fault. Prints a line for each mutant, and exits with 1 unless all were caught::

    python -m tests.support.mutants [FILE ...]

The copy has the layout of an installed package, and pytest runs inside it: a checkout's own folder ``commlib`` comes
first for whatever is started in the checkout, pytest and the server that ranks are forked from among them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tests.support.steady import FAST

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commlib", "compressors", "transports", "bench")
KINDS = ("sign", "off by one", "order")
PATIENCE = 120.0  # seconds that a run may take before it counts as one that hangs

_PASSED, _FAILED = 0, 1  # pytest's exit codes; by any other no test was judged
_HERE = "tests/test_copy.py"  # in the copy only
_HERE_SOURCE = '''"""What is tested is the copy, in this process and in forked ranks."""

import os
import sys

import commlib.bench
import commlib.compressors
import commlib.transports


def strays(world=None):
    import commlib.transports.process_group.engine  # a deep one

    found = [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "commlib"]
    return [f for f in found if not f.startswith(os.getcwd() + "/commlib/")]


def test_here():
    assert strays() == []


def test_in_ranks(fleet):
    assert fleet.run(2, strays) == [[], []]
'''


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        file: from the repository's root.
        old: what is there, once.
        new: what stands there instead.
        kind: of :data:`KINDS`.
        caught_by: pytest's name of the test that fails then.
    """

    file: str
    old: str
    new: str
    kind: Literal["sign", "off by one", "order"]
    caught_by: str


def swapped(file: str, first: str, second: str, caught_by: str) -> Mutant:
    """Two blocks of statements that follow each other, in the wrong order."""
    return Mutant(file, first + second, second + first, "order", caught_by)


MUTANTS: Sequence[Mutant] = (
    Mutant(
        "commlib/exchange/sequencer.py",
        'result.device.type == "cuda" or self._failed is not None:',
        'result.device.type == "cuda" or self._failed is None:',
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
        "(size - 1) * HEADER < summed",
        "(size - 1) * HEADER > summed",
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
        if dirty:
            return "summed"
""",
        """\
        if most <= self._room.rows and all(d == self._room.dtype for d in dtypes):
            return "gathered"
""",
        "tests/commlib/exchange/factors/test_rounds.py::test_gradient_besides_the_rows_has_the_matrices_summed_though_all_rows_have_come",
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


# -- the copy -----------------------------------------------------------------------------------


def package(file: str) -> str:
    """Where a file of the repository is in a copy."""
    return file if file.partition("/")[0] == "commlib" else f"commlib/{file}"


def copy(folder: Path) -> None:
    """The package as it is installed, and the tests."""
    nothing_built = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / package(name), ignore=nothing_built, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=nothing_built)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / _HERE).write_text(_HERE_SOURCE, encoding="utf-8")


def put_in(mutant: Mutant, folder: Path) -> None:
    """The fault, into a copy.

    Raises:
        ValueError: what it replaces is not there, or several times.
    """
    path = folder / package(mutant.file)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} of: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


# -- a run --------------------------------------------------------------------------------------


def run(folder: Path, tests: Sequence[str], patience: float = PATIENCE) -> tuple[int | None, str]:
    """Pytest's exit code and what it printed; None as code: it was not through in time, and was killed whole."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", FAST, *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder.parent)}  # what a killed run leaves goes, too
    # A session of its own is a process group of its own: what hangs is killed with the ranks that it has forked.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=patience)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # also at Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(mutant: Mutant, clean: Path, folder: Path) -> bool:
    """Whether its test catches it; prints that.

    Raises:
        ValueError: no test was run: the table is wrong.
    """
    shutil.copytree(clean, folder)
    try:
        put_in(mutant, folder)
        code, said = run(folder, [mutant.caught_by])
    finally:
        shutil.rmtree(folder)
    if code not in (None, _PASSED, _FAILED):
        raise ValueError(f"{mutant.file}, {mutant.kind}: pytest {mutant.caught_by} exits with {code}:\n{said}")
    how = {None: f"hangs: {mutant.caught_by}", _PASSED: "SURVIVED", _FAILED: f"caught by {mutant.caught_by}"}[code]
    print(f"{mutant.file}, {mutant.kind}: {how}", flush=True)
    return code != _PASSED


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="only the mutants of these, from the root; default: all"
    )
    files = parser.parse_args().files
    if unknown := set(files) - {m.file for m in MUTANTS}:
        parser.error(f"no mutants of {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not files or m.file in files]
    with tempfile.TemporaryDirectory(prefix="commlib-mutants-") as room:
        clean = Path(room) / "clean"
        copy(clean)
        code, said = run(clean, [_HERE, *dict.fromkeys(m.caught_by for m in chosen)], patience=10 * PATIENCE)
        if code != _PASSED:
            print(f"without any fault pytest exits with {code}:\n{said}", file=sys.stderr)
            return 2
        try:
            caught = sum([check(m, clean, Path(room) / "mutant") for m in chosen])
        except ValueError as e:
            print(f"the table is wrong: {e}", file=sys.stderr)
            return 2
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
