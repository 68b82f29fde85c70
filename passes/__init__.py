"""Graph in, graph out: capture, describe, rewrite, verify."""
