"""What the tests do with each command of the documentation."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess

from tests.docs.reading import Unreadable, read
from tests.support.docs_reader import PAGES, ROOT, Command, all_commands, without_make

COMMANDS = [c for page in PAGES for c in all_commands(page)]

AS_PRINTED = re.compile(r"commlib (doctor|plan (?!MODEL)\S.*|keys (new( --replace)?|show))|python -c .*")
"""These take seconds at most, and need nothing that a test has not."""

REPLACED = {
    # What a reader fills in.
    "plan MODEL": "plan vgg19",
    "--rate RATE --model MODEL": "--rate 200mbit --model gpt-small",
    "--rounds ROUNDS --steps STEPS": "--rounds 1 --steps 1",
    "torchrun …": "torchrun --nproc-per-node 2",
    "OPTIONS": "",
    "…": "",
    "HOST0": "127.0.0.1",  # and both nodes are this machine
    # Models and gradients that are no more than large.
    "--model fc": "--model gpt-small",  # 234 MB
    "--model resnet50": "--model mymodels:few",
    "--model gpt ": "--model gpt-small ",
    "--numel 16777216": "--numel 4096",
    "--numel 1048576": "--numel 4096",
    # One run of each kind, of six; each codes and evaluates the same.
    "fsdp_text.py none int8 int4 none+int8 int4+int8 onebit": "fsdp_text.py none int4+int8",
    # Options that stand elsewhere.
    "python3 -m venv .venv": "python3 -m venv --without-pip .venv",
    "python -m timeit ": "python -m timeit -n 1 -r 1 ",
}

CUT = {
    r"commlib bench train\b": "--rounds 1 --steps 1 --seconds 5",
    r"commlib bench train\b(?!.* --(only|comm) )": "--only none",
    r"commlib bench train\b(?!.* --model )": "--model gpt-small",
    r"commlib bench exchange\b": "--model mymodels:few --min-size 16 --rounds 1 --steps 1 --seconds 5",
    r"^(?!torchrun ).*commlib bench link\b": "--min 1kB --max 16kB --seconds 2",
    r"^torchrun .*commlib bench link\b": "--quick --seconds 2",  # not --max: see docs/benchmarks.md
    r"commlib bench link\b(?!.* --op )": "--op all_reduce",
    r"commlib bench codec\b": "--repeat 1",
    r"commlib bench codec\b(?!.* --numel )": "--numel 4096",
    r"commlib bench (train|link|exchange)\b.* --hosts 4\b": "--hosts 2",
    r"commlib bench server\b": "--hosts 2 --mb 1 --rounds 1 --steps 1",
    r"commlib train --task sparse-logistic": "--passes 1 --ranks 1 --servers-count 1",
    r"commlib train\b(?!.* --task sparse-logistic)": "--steps 2",
    r"commlib train\b.* --seeds ": "--seeds 1",
    r"commlib train\b.* --ranks 16 .* --step-time ": "--ranks 4 --step-time 0.01",
    r"commlib bench cost\b": "--rounds 1 --steps 1",
    r"commlib bench cost\b(?!.* --model )": "--model mymodels:few",
    r"commlib bench cost\b(?!.* --(only|comm) )": "--only none",
    r"commlib bench gpu\b": "--device cpu --stage sanitizer",  # which is left out there, with its reason
    r"commlib bench train\b.* --backend nccl\b": "--backend gloo",
    r"examples/(accelerate|lightning)_digits\.py": "--epochs 1",
    r"examples/fsdp_digits\.py": "--seeds 1 --steps 2",
    r"examples/fsdp_text\.py": "--steps 2",
    r"examples/shared_link\.py": "--seconds 0.5",
    r"examples/two_levels\.py": "--layers 1 --steps 1",
    r"python (-P )?-m commlib$": "doctor --no-selftest",
    r"python -m commlib\.bench\.chaos": "--runs 1 --seed 1",
    r"python -m tests\.support\.steady": "--runs 0",
    r"python -m tests\.support\.unusual_models": "",
    r"python -m tests\.support\.verify_cost": "--steps 3 --width 64",
    r"python -m tests\.support\.mutants": "commlib/messaging/nesting.py",
    r"python -m pytest ": "-n 0 --collect-only -q",
    r"python -m pytest (?!.* tests/)": "tests/compressors/kernels",  # not all of them, which takes half a minute
    r"pip install ": "--dry-run --no-index --no-build-isolation",  # all that it asks for is here, or it fails
}
"""Pattern → options that are added, of two the last counts: a command does what it says with less of everything.
What a pattern here finds is run; a new command, too."""

TOLD = {
    "figures": (
        "commlib bench report FOLDER",
        "commlib bench report figures/",
        "commlib bench compare A B",
        "commlib bench compare A B --within 5",
        "commlib bench compare before/ after/",
        "commlib bench compare before after",
        "commlib bench codec --save before",
    ),
    "keys": ("commlib keys allow 'PUBLIC KEY' hostB", "commlib keys allow 'NEW KEY' hostA"),
    "servers": (
        "commlib server meet | run | status",
        "commlib server meet --at 10.0.0.1:29400",
        "commlib server run --at 10.0.0.1:29400",
        "commlib server status --at 10.0.0.1:29400",
        "commlib server run --job hetpipe-stage-0",
        "commlib server run --snapshots FOLDER --every 1000",
    ),
    "watching": ("torchrun --nproc-per-node 2 watched.py", "commlib top", "commlib top --once"),
    "traces": (
        "torchrun --nproc-per-node 2 train.py",
        "commlib trace merge trace.json trace.rank1.json --into all.json",
    ),
    "codecs": (
        "commlib bench codec --codec half",
        "commlib train --comm none --comm half",
        "commlib train --comm half",
        "commlib train --comm float8",
    ),
    "rounds": ("python -m commlib.bench.plan.convergence_measure > table.csv",),
    "help": ("commlib COMMAND --help",),
}
"""Commands that belong together, in tests/docs/test_commands_told.py."""

IN_A_LAB = re.compile(r"(?:COMMLIB_INSECURE=1 )?commlib bench lab .*-- (python (train|job|figure)\.py.*|sh -c .*)")
"""Run with a program that says which rank it is."""

ELSEWHERE = {
    "make docs": "tests/docs/test_site.py",
    "make simulate": "tests/integration/test_simulation.py",
    "make soak": "tests/integration/test_soak.py",
    "make exits": "tests/integration/test_clean_exit.py",
}
"""Its recipe is what that test runs."""

NEEDS = {"make spark": "needs Spark and Java", "make test-torch27": "needs torch 2.7"}
"""Their tests are found, and not run."""

PARSED: dict[str, str] = {}
"""Why it is no more than read by its parser."""


@functools.cache
def treatment(command: Command) -> str:
    """What is done with it; the words are those of the counts."""
    line = command.line
    if command.runs or AS_PRINTED.fullmatch(line):
        return "run as printed"
    if "--device cuda" in line:
        return "needs a GPU"
    if line in NEEDS:
        return NEEDS[line]
    if line == ".ci/run" or re.sub(r"^[A-Z_]+=\S+ ", "", line) in {f"make {target}" for target in run_by_ci()}:
        return "run by .ci/run"
    if command.inline and is_name(line):
        return "a name"
    if line in PARSED:
        return "parsed"
    if is_cut(line):
        return "run cut"
    return "untreated"


def is_cut(line: str) -> bool:
    """Whether tests run it with less to do."""
    if line in ELSEWHERE or any(line in lines for lines in TOLD.values()) or IN_A_LAB.fullmatch(line):
        return True
    made = recipe(line) if line.startswith("make ") else [line]
    return any(cut(each) != each for each in made)


def cut(line: str) -> str:
    """What is run in its place."""
    more = [options for pattern, options in CUT.items() if re.search(pattern, line)]
    for printed, ours in REPLACED.items():
        line = line.replace(printed, ours)
    return " ".join([line, *more])


def is_name(line: str) -> bool:
    """Of a command in a sentence: it is the beginning of another, or none as it stands."""
    try:
        read(Command("", line))
    except Unreadable:
        return True
    words = shlex.split(line)
    others = (c.line.split() for c in COMMANDS if not (c.inline and c.line == line))
    return any(other[: len(words)] == words and other != words for other in others) and not any(
        c.line == line for c in COMMANDS if not c.inline
    )


@functools.cache
def run_by_ci() -> frozenset[str]:
    """The targets of make that .ci/run makes, and what they depend on."""
    found = set(re.findall(r"^(?:step )?make ([a-z-]+)", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE))
    for line in (ROOT / "Makefile").read_text().splitlines():
        rule = re.match(r"([a-z-]+):([^#]*)", line)
        if rule is not None and rule[1] in found:
            found |= {word for word in rule[2].split() if re.fullmatch("[a-z-]+", word)}
    return frozenset(found)


@functools.cache
def recipe(line: str) -> list[str]:
    """The commands that ``make TARGET`` executes, without what sets things up."""
    target = shlex.split(line)[1:]
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", *target], cwd=ROOT, env=without_make(), capture_output=True, text=True
    )
    found = re.findall(r"^(?:[A-Z0-9_]+=\S+ )*\S*/bin/((?:commlib|python|mkdocs) .*)$", done.stdout, flags=re.MULTILINE)
    return [each for each in found if "venv" not in each and " pip " not in each]
