"""Names under which drafters and verifiers can be asked for in the flag.

Lowest layer: holds two dictionaries and knows nothing of what is in them.
"""

__all__ = ["DRAFTERS", "VERIFIERS", "lookup", "register_drafter", "register_verifier"]

import difflib

DRAFTERS: dict[str, type] = {}
VERIFIERS: dict[str, type] = {}


def register_drafter(name: str, cls: type) -> None:
    """Make `cls` (a `hf_specdec.drafters.Drafter`) available as ``method=name``.

    Args:
        name: what users write in ``speculative_config={"method": name}``.
        cls: a concrete `Drafter`; replaces an earlier class of that name.

    Raises:
        TypeError: `cls` is not a class with a `propose` method.
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "propose", None)):
        raise TypeError(f"register_drafter expects a Drafter class with a `propose` method, got {cls!r}.")
    DRAFTERS[name] = cls


def register_verifier(name: str, cls: type) -> None:
    """Make `cls` (a `hf_specdec.verification.Verifier`) available as ``rejection_sample_method=name``.

    Args:
        name: what users write in ``speculative_config={"rejection_sample_method": name}``.
        cls: a concrete `Verifier`; replaces an earlier class of that name.

    Raises:
        TypeError: `cls` is not a class whose instances can be called.
    """
    if not isinstance(cls, type) or "__call__" not in dir(cls):
        raise TypeError(f"register_verifier expects a Verifier class with a `__call__` method, got {cls!r}.")
    VERIFIERS[name] = cls


def lookup(kind: str, table: dict[str, type], name: str) -> type:
    """The class registered as `name`; `kind` is the flag's key, for the message.

    Raises:
        ValueError: unknown name; the message gives the nearest one and the list.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown {kind} {name!r}.{hint} Available: {', '.join(sorted(table))}.")
