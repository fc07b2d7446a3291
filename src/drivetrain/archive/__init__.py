"""Runs on disk: writing, reading, listing, comparing, and where a run came from.

What lives here: everything that knows the layout of a run directory (``docs/run-directory.md``). The run
directory is the only thing that passes between the parts of Drivetrain, so nobody else opens its files.

What may not live here: torch, anything that trains or measures, and anything that constructs a class from
a file. The archive holds plain JSON, JSON lines and TOML; nothing is ever unpickled.

Modules: ``encoding`` (JSON with NaN and infinity), ``atomic`` (replace a file whole), ``lines`` (append-only
JSON lines), ``writer``, ``heartbeat``, ``reader``, ``listing``, ``provenance``, ``dimensions`` (the five
dimensions of one run), ``account_file`` (the accounts of its windows), ``compare``.
Import from the module: importing the package costs nothing.
"""

__all__: list[str] = []
