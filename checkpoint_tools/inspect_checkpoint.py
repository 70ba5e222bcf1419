"""What is in a checkpoint of any format: python checkpoint_tools/inspect_checkpoint.py PATH

The same as `capo-megatron convert inspect`.
"""

import sys

from capo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
