"""`python -m digenrl` is `digenrl`."""

import sys

from digenrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
