"""Model weights outside of a model: shapes, the table between the two naming schemes, and every format they lie in.

Nothing here imports Megatron-core or builds a model: a conversion is a mapping of tensors, one after another.

    shape.py        ModelShape: the sizes of a decoder; config.json both ways; the families that are supported
    table.py        which Megatron parameter is made of which Hugging Face tensors, per family
    sources.py      WeightSource: tensors under their Hugging Face names, whatever they lie in
    huggingface.py  directories of safetensors
    distributed.py  Megatron's dist-checkpoints, read; distributed_files.py writes them
    legacy.py       Megatron-LM's mp_rank folders
    checkpoint.py   any of these, opened                 manifest.py  a hash per tensor, and who checks it
    convert.py      from one format to another: reading.py block by block, into a folder set aside (aside.py)
    compare.py      whether two hold the same            inspect.py   what one holds
    raw.py          bytes in files                       ranks.py     processes that share a conversion
"""
