"""Reader of PyTorch's own profiler files (Kineto's Chrome JSON), 2021 to today, whole or damaged.

The text is inflated in blocks (``source``), cut between events and decoded (``stream``, with ``scanning`` and
``salvage`` for what does not decode), turned into columns (``columns``, ``numbers``), put right (``damage``) and
stored for the next time (``cache``). Nothing here knows what an event means for the account, and nothing holds
the whole file.
"""

__all__: list[str] = []
