"""``python -m commlib.bench.train``: the same as ``commlib train``."""

import sys

from commlib.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
