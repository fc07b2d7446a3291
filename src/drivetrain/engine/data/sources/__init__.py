"""Inputs of ``data prepare``: texts, JSON lines, tables and sharded data sets, in blocks that a process can encode.

What lives here: one file a kind of input, each cutting its sources into blocks (``blocks``, in the process that
prepares) and turning a block into texts (``texts``, in whichever process encodes it). What may not: anything that
knows a tokenizer or the files of a corpus.
"""

__all__: list[str] = []
