"""Reads and writes policy files, and what they name; with `code_files.py` and `yaml_text.py`, all that touches one."""

from pathlib import Path

import msgspec

from ..protocol.errors import PolicyError
from ..protocol.plain_yaml import write_yaml
from .code_files import load_codes, spelled_out
from .reading import problems_of
from .rules import broken_rules
from .schema import Policy
from .yaml_text import MAX_FILE_BYTES, read_text, read_tree, refuse

__all__ = ["MAX_FILE_BYTES", "load_policy", "parse_policy", "render"]


def load_policy(path: str | Path) -> Policy:
    """Read the policy at `path`, and the code table that it names. Paths in it start at the policy's directory.

    Raises PolicyError, every mistake on its own line, when one of them is wrong.
    """
    path = Path(path)
    policy = parse_policy(read_text(path), str(path))
    faults = policy.faults
    if faults.codes_file is not None:
        codes = {**load_codes(path.parent / faults.codes_file), **faults.codes}
        faults = msgspec.structs.replace(faults, codes=codes, codes_file=None)
    sources = tuple(str((path.parent / source).absolute()) for source in faults.sources)
    return msgspec.structs.replace(policy, faults=msgspec.structs.replace(faults, sources=sources))


def parse_policy(text: str, source: str) -> Policy:
    """Make a policy of YAML text; `source` names it in errors. An empty text is the default policy.

    Raises PolicyError: one line for each mistake, with the path of its key, what was found and what is
    allowed.
    """
    tree = read_tree(text, source)
    if tree is None:
        return Policy()
    if isinstance(tree, dict) and isinstance(tree.get("faults"), dict) and "codes" in tree["faults"]:
        tree = {**tree, "faults": {**tree["faults"], "codes": spelled_out(tree["faults"]["codes"])}}
    refuse(problems_of(tree), source)
    try:
        policy = msgspec.convert(tree, Policy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{source}: {error}") from error
    refuse(broken_rules(policy), source)
    return policy


def render(policy: Policy) -> str:
    """Return `policy` as YAML text with every key; `parse_policy` makes the same policy of it."""
    tree = msgspec.to_builtins(policy)
    return write_yaml(tree)
