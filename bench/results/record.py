"""Results of a benchmark, in the one form in which they are printed, saved, compared and reported.

A record is facts that hold for the whole run and rows of figures. Saved or printed with ``--json`` it is
one JSON object a line, a row each, with the facts under ``"run"``:

    {"schema": 1, "kind": "link", "run": {"ranks": 4, "line_gbit_s": 0.19, …}, "op": "all_reduce", …}

so every line can be read by itself and files can be joined with ``cat``. docs/benchmarks.md describes the
fields of each kind.

What became of ``--hierarchy``, in words.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import commlib
from commlib.bench.results.table import Row, print_rows
from commlib.planning.plan import Plan

SCHEMA = 1
KINDS = ("link", "codec", "exchange", "train", "fsdp2", "cost", "plan", "server", "gpu")
_OWN = ("schema", "kind", "run")


@dataclasses.dataclass(frozen=True)
class Record:
    """Results of one run of one benchmark.

    Args:
        kind: one of :data:`KINDS`.
        run: facts of the run (:func:`facts`); JSON values.
        rows: figures; JSON values, all rows with the same columns.
    """

    kind: str
    run: Mapping[str, object]
    rows: list[Row]


def facts(**more: object) -> dict[str, object]:
    """Facts of a run for its reader: when, with what, on which machine, by which command; and ``more``."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["commlib", *sys.argv[1:]]),
        "commlib": commlib.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        **more,
    }


def emit(record: Record, *, title: str, as_json: bool, save: Path | None, hide: tuple[str, ...] = ()) -> None:
    """Print a record as a table (or as JSON lines), and keep it if asked to.

    Args:
        record: what was measured.
        title: above the table: the facts without which its figures mean nothing.
        as_json: JSON lines instead.
        save: folder for the lines; made if it is not there.
        hide: columns the table leaves out, for want of width.
    """
    if save is not None:
        write(record, save)
    if as_json:
        print("\n".join(lines(record)))
    else:
        shown = [{k: v for k, v in row.items() if k not in hide} for row in record.rows]
        print_rows(shown, title=title)


def lines(record: Record) -> list[str]:
    """The record as JSON lines."""
    head = {"schema": SCHEMA, "kind": record.kind, "run": dict(record.run)}
    return [json.dumps({**head, **row}) for row in record.rows]


def write(record: Record, folder: Path) -> Path:
    """Keep a record in a new file of the folder, named after its kind and the time; the path is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")
    for n in range(1000):
        path = folder / f"{record.kind}-{stamp}{f'-{n}' if n else ''}.jsonl"
        try:
            with path.open("x", encoding="utf-8") as out:
                out.write("".join(f"{line}\n" for line in lines(record)))
            return path
        except FileExistsError:
            continue
    raise ValueError(f"{folder} holds a thousand records of this second already")


def read(path: Path) -> list[Record]:
    """Records of a file, or of all ``*.jsonl`` files of a folder in the order of their names.

    Lines of one file with the same kind and the same facts make one record.

    Raises:
        ValueError: nothing there, or a line that is no row of ours; the message names file and line.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ValueError(f"{path}: no saved figures there; benchmarks keep them with --save FOLDER")
    found: list[Record] = []
    for file in files:
        own: dict[str, Record] = {}
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{file}: cannot be read as text ({e})") from e
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                kind, run, row = _parse(line, f"{file}:{number}")
                key = json.dumps([kind, run], sort_keys=True)
                own.setdefault(key, Record(kind, run, [])).rows.append(row)
        found += own.values()
    if not found:
        raise ValueError(f"{path}: the files there are empty")
    return found


def _parse(line: str, where: str) -> tuple[str, dict[str, object], Row]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where}: not JSON ({e.msg})") from e
    if not isinstance(value, dict) or not isinstance(value.get("run"), dict) or value.get("kind") not in KINDS:
        raise ValueError(f"{where}: not a row that `commlib bench … --save` wrote")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"{where}: schema {value.get('schema')!r}; this commlib reads {SCHEMA}")
    return value["kind"], value["run"], {k: v for k, v in value.items() if k not in _OWN}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def levels_of(plan: Plan) -> str:
    """``2 nodes of 2``; or that exchanges are flat, and why if a hierarchy was asked for."""
    if plan.local > 1:
        return f"{plan.world} nodes of {plan.local}"
    return plan.about.partition("hierarchy: ")[2].partition(";")[0] or "flat"
