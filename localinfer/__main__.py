"""`python -m localinfer` is the `localinfer` command."""

import sys

from localinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
