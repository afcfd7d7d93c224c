"""Emulated hosts on one machine: network namespaces on a bridge, each link as slow as one asks.

A lab owns nothing outside itself. Bridge, hosts, links and every process in them live in namespaces that
one keeper process holds open, and the keeper ends when its standard input does. However the owner dies,
the kernel takes all of it down: there is no name to collide with and nothing to clean up
(docs/adr/0005-lab.md).
"""

from .lab import Counters, Lab, unavailable
from .namespaces import LabError
from .network_commands import parse_rate

__all__ = ["Counters", "Lab", "LabError", "parse_rate", "unavailable"]
