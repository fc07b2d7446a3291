"""A launcher that starts all processes on this machine, as a cluster's would on many, with the faults that it is told
to have. Its own exit code is 7 wherever a process failed, and it labels nothing and passes nothing on.

    python fake_launcher.py RANKS [--without NAME] [--only K] -- COMMAND…
"""

import argparse
import os
import socket
import subprocess
import sys


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--only", type=int, default=None)
    options = parser.parse_args(words[:at])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(options.ranks if options.only is None else options.only):
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": options.ranks,
            "LOCAL_WORLD_SIZE": options.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
        for name in options.without:
            del environment[name]
        processes.append(subprocess.Popen(words[at + 1 :], env=environment, start_new_session=True))
    print("the launcher has its say")
    codes = [process.wait() for process in processes]
    return 7 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
