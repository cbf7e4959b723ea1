"""Examples: their sources, their order, how they are varied.

It may use `config` and the leaves, and its command also `commands`.
"""
