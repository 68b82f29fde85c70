"""Moves and packs bytes, and measures: links to host tiers, graph ops, the host side of a step."""
