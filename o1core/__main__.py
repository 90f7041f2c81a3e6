"""`python -m o1core`: the command line."""

import sys

from o1core.cli import main

if __name__ == "__main__":
    sys.exit(main())
