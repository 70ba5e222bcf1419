"""`python -m capo_megatron`. The guard matters: Megatron's checkpoint writer starts processes that import this."""

import sys

from capo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
