"""What the benchmark scripts share: claims, blocks in processes of their own, the watch over a quiet machine.

Nothing here is imported by the package, and nothing here knows a peer.
"""
