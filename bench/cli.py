"""``commlib bench``: one sub-command per thing that can be measured."""

from __future__ import annotations

import typer

from commlib.bench.codec.command import codec
from commlib.bench.cost.command import cost
from commlib.bench.exchange.command import exchange
from commlib.bench.gpu.command import gpu
from commlib.bench.lab.command import lab
from commlib.bench.link.command import link
from commlib.bench.report.command import report
from commlib.bench.report.compare import compare
from commlib.bench.server.command import server
from commlib.bench.training.command import train

app = typer.Typer(name="bench", help="Measure the parts on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure the parts on this machine."""


# The options of the command that runs on the hosts are its own.
app.command(
    "lab",
    short_help="Run a command on emulated hosts with slow links.",
    context_settings={"allow_interspersed_args": False},
)(lab)
app.command("link", short_help="Every collective by message size, against the raw TCP line.")(link)
app.command("codec", short_help="Speed, error and size of codecs on one gradient.")(codec)
app.command("exchange", short_help="Every exchange × codec at the layers of a real model.")(exchange)
app.command("train", short_help="Would it help here? DDP, PyTorch's hooks and ours in turn.")(train)
app.command("cost", short_help="Memory, first steps and time of cores beyond plain DDP's.")(cost)
app.command("gpu", short_help="All that only a GPU can tell, in some minutes.")(gpu)
app.command("server", short_help="Steps with a parameter server, against the line.")(server)
app.command("report", short_help="Saved figures as one HTML page, with a verdict.")(report)
app.command("compare", short_help="Two saved runs as ratios.")(compare)
