"""`python -m capo_megatron`. The guard matters where libraries start processes that import this."""

import sys

from capo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
