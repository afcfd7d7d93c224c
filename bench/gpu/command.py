"""``commlib bench gpu``: all that only a GPU can tell of commlib, in some minutes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from commlib.bench.launch.processes import cores
from commlib.bench.results.record import Record, facts, write
from commlib.bench.results.table import Row, cell, print_rows
from commlib.errors import unknown

from .stages import STAGES, Skipped, Stage


def gpu(
    stage: Annotated[
        list[str] | None, typer.Option(help=f"Only this one; repeat it: {', '.join(s.name for s in STAGES)}. [all]")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, simulated or cpu; auto takes the GPU if there is one.")] = "auto",
    seconds: Annotated[float, typer.Option(min=10, help="For all stages; what no time is left for is left out.")] = 600,
    save: Annotated[Path, typer.Option(help="Folder for NAME.jsonl and NAME.md, named by the device.")] = Path(
        "runs/gpu"
    ),
) -> None:
    """Test and time commlib on this machine's first GPU, part by part, each result as soon as it is there.

    Needs no network and no second GPU: ranks share one, over NCCL. Without a GPU kernels run in an interpreter, and
    ranks on a simulated accelerator by NCCL's rules, where what streams do not order is an error. With --device cpu
    ranks are plain, over Gloo. Neither says how fast a GPU is.

    host_waits: times a steady step makes the host wait for the device. replicas: whether all ranks have the same
    weights at the end; weights: whether they are DDP's to the last bit. of_copy: what a codec must read and write, over
    what a copy on the device moves in the same time.
    """
    names = [s.name for s in STAGES]
    for name in stage or ():
        if name not in names:
            raise ValueError(unknown("stage", name, names))
    where = ("cuda" if torch.cuda.is_available() else "simulated") if device == "auto" else device
    if where not in ("cuda", "simulated", "cpu"):
        raise ValueError(unknown("device", device, ("auto", "cuda", "simulated", "cpu")))
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here; use --device simulated")
    about = _about(where)
    typer.echo(", ".join(f"{k}: {v}" for k, v in about.items()))
    end, page, bad = time.monotonic() + seconds, [_heading(about)], []
    file = save / f"{re.sub(r'[^a-z0-9]+', '-', str(about['device']).lower()).strip('-')}.md"
    for each in STAGES:
        if stage and each.name not in stage:
            continue
        began = time.monotonic()
        limit_s = each.limit_s if where == "cuda" else seconds  # how long a CPU takes says nothing
        rows, said = _of(each, where, min(limit_s, end - began))
        took = time.monotonic() - began
        if said.startswith("failed") or not all(map(_sound, rows)):
            bad.append(each.name)
        if rows:
            print_rows(rows, title=f"{each.about} ({took:.0f} s)")
            write(Record("gpu", facts(stage=each.name, **about), rows), save)
        else:
            typer.echo(f"{each.about}: {said}")
        page.append(_section(each, rows, said))
        save.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(page), encoding="utf-8")
        sys.stdout.flush()
    typer.echo(f"kept as {file}")
    if bad:
        typer.echo(f"not as it should be: {', '.join(bad)}", err=True)
        raise typer.Exit(1)


def _sound(row: Row) -> bool:
    """Whether nothing of ours in a row is wrong, however slow it is.

    PyTorch's own hooks are not ours to judge: over Gloo its powerSGD_hook hangs now and then, and the row says so.
    """
    if str(row.get("route", "")).startswith("torch-"):
        return True
    wrong = row.get("failed") or row.get("replicas") == "differ" or row.get("loss_ok") is False
    return not wrong and row.get("status", "ok") == "ok"


def _of(stage: Stage, device: str, limit_s: float) -> tuple[list[Row], str]:
    """Rows of a stage, or why there are none."""
    if limit_s < 5:
        return [], "left out: no time is left; give it more with --seconds"
    try:
        return stage.run(device, limit_s), ""
    except Skipped as e:
        return [], f"left out: {e}"
    except (TimeoutError, subprocess.TimeoutExpired):
        return [], f"failed: not done in {limit_s:.0f} s"
    except Exception as e:  # the next stage may tell more
        return [], f"failed: {type(e).__name__}: {e}"


def _about(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {"device": device, "cores": cores(), "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30)}
        about |= {"nccl": _nccl()}
        try:
            import triton

            about["triton"] = triton.__version__
        except ImportError:
            about["triton"] = "none: codecs run as torch operators"
    return about


def _nccl() -> str:
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def _heading(about: dict[str, Any]) -> str:
    made = facts()
    facts_of = ", ".join(f"{k} {v}" for k, v in about.items() if k != "device")
    return f"# {about['device']}\n\n`{made['command']}`, {str(made['time'])[:10]}; {facts_of}.\n"


def _section(stage: Stage, rows: list[Row], said: str) -> str:
    lines = [
        f"## {stage.about[0].upper()}{stage.about[1:]}\n",
        (stage.run.__doc__ or "").strip().splitlines()[0] + "\n",
    ]
    if rows:
        columns = list(rows[0])
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(cell(v) for v in row.values())} |" for row in rows]
    else:
        lines.append(f"{said}.")
    return "\n".join(lines) + "\n"
