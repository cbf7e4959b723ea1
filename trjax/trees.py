"""Leaves of parameter trees by name."""

from collections.abc import Container, Mapping
from typing import Any

import jax


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, `/` between the keys.

    >>> name_leaves({"stem": {"conv": {"kernel": 1}}})
    {'stem/conv/kernel': 1}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def restore_leaves(named: Mapping[str, Any], like: Any) -> Any:
    """Returns a tree of the structure of `like` with the named leaves: the inverse of `name_leaves`."""
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in name_leaves(like)])


def select_leaves(tree: Any, names: Container[str], prefix: str = "") -> Any:
    """Returns a tree of dicts with only the named leaves.

    >>> select_leaves({"stem": {"kernel": 1, "bias": 2}}, {"stem/bias"})
    {'stem': {'bias': 2}}
    """
    if not isinstance(tree, Mapping):
        return tree
    kept = {key: value for key, value in tree.items() if isinstance(value, Mapping) or f"{prefix}{key}" in names}
    return {key: select_leaves(value, names, f"{prefix}{key}/") for key, value in kept.items()}
