"""Files that a URL names, in a bounded folder on this machine: :mod:`.store` reads them through fsspec,
:mod:`.transfer` brings one here, :mod:`.cache` keeps them, :mod:`.inputs`
knows which of them a corpus or an input consists of.

fsspec is optional, and imported where a URL is read. Nothing here knows what the files hold.
"""
