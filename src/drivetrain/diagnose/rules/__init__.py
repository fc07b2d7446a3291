"""One rule a file, each with a ``RULE``; ``diagnose.rule.rules`` finds them."""
