"""``python -m commlib``: the ``commlib`` command where the scripts folder is not on the path."""

from commlib.cli.main import main

if __name__ == "__main__":
    main()
