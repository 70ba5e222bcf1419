"""A Hugging Face directory as a Megatron dist-checkpoint: python checkpoint_tools/hf_to_megatron.py SRC DST

The same as `capo-megatron convert hf-to-megatron`, see --help. Under torchrun the ranks share the tensors.
"""

import sys

from capo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
