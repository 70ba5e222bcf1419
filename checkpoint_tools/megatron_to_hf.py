"""A Megatron checkpoint of any layout as a Hugging Face directory: python checkpoint_tools/megatron_to_hf.py SRC DST

The same as `capo-megatron convert megatron-to-hf`, see --help. Under torchrun the ranks share the files.
"""

import sys

from capo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
