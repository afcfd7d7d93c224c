"""``commlib bench``: one sub-command per thing that can be measured."""

from __future__ import annotations

import typer

from commlib.bench.codec import codec
from commlib.bench.compare import compare
from commlib.bench.exchange.command import exchange
from commlib.bench.lab.command import lab
from commlib.bench.page.command import report

app = typer.Typer(name="bench", help="Measure the parts on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure the parts on this machine."""


app.command("lab", context_settings={"allow_interspersed_args": False})(lab)  # COMMAND's options are its own
app.command("codec")(codec)
app.command("exchange")(exchange)
app.command("report")(report)
app.command("compare")(compare)
