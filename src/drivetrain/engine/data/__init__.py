"""From text to micro-batches: indexed corpora, tokenizers, the order of samples, the loader.

What lives here: reading and writing corpora on disk (``indexed``, ``meta``, ``fingerprint``), making
them (``sources``, ``tokenizer``, ``prepare`` and what it is made of, ``standard_library``), opening one for a run
(``corpus``; those of other tools: ``formats``), and turning it into batches (``order``, ``split``, ``transform``,
``sequences``, ``loader``).
What may not: anything that knows a model's layers, a device, or the training loop. Only ``sequences`` and
``loader`` need torch; import from the modules, so that preparing a corpus does not wait for it.
"""

__all__: list[str] = []
