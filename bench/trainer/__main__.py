"""``python -m commlib.bench.trainer``: the same as ``commlib train``."""

import sys

from commlib.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
