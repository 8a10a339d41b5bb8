"""Python runs this when it starts."""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def _find_others(name, path=None, target=None):
    return None if name == "vllm" else _find_spec(name, path, target)


PathFinder.find_spec = _find_others
