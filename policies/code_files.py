"""Read tables of fault codes: those that come along, a job's own, and the files that clusters have already.

Three forms are understood: midstep's (`version: 1` and `codes:`), and, as MindCluster's components have them,
`<Level>Codes: [code, ...]` at the top (faultCode.json, SwitchFaultCode.json) or one floor down (`publicFaultCode`,
`FaultTypeCode`).
"""

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from .fault_codes import CodeRule, FaultCodes, LevelName
from .reading import Problem, problems_of
from .rules import kind_problems
from .schema import FaultPolicy
from .yaml_text import read_text, read_tree, refuse

FILES = ("npu_fault_codes.yaml", "fault_codes.yaml")  # of a code that is in both the last one counts
_LISTS = "Codes"  # what the keys of the clusters' own files end with
_NESTED = ("publicFaultCode", "FaultTypeCode")


class CodeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole table: `configs/fault_codes.yaml` says what each key means."""

    version: int
    codes: dict[str, CodeRule]


def default_codes() -> dict[str, CodeRule]:
    """Return the tables that come along, as one."""
    configs = resources.files("midstep.configs")
    return {code: rule for name in FILES for code, rule in load_codes(Path(str(configs / name))).items()}


def fault_codes(policy: FaultPolicy) -> FaultCodes:
    """Return what codes mean to a job: its own rules over the table that comes along."""
    return FaultCodes(default_codes(), policy.codes, policy.unknown_code)


def load_codes(path: Path) -> dict[str, CodeRule]:
    """Read a table of codes. Raises PolicyError, every mistake on its own line with file and key."""
    source = str(path)
    tree = read_tree(read_text(path), source)
    lists = _level_lists(tree)
    if lists:
        return _from_lists(lists, source)
    if isinstance(tree, dict) and "codes" in tree:
        tree = {**tree, "codes": spelled_out(tree["codes"])}
    refuse(problems_of(tree, CodeFile), source)
    file = msgspec.convert(tree, CodeFile)
    if file.version != 1:
        refuse([Problem("version", f"found {file.version}; allowed: 1")], source)
    refuse(kind_problems(file.codes, "codes"), source)
    return file.codes


def spelled_out(codes: Any) -> Any:
    """Return `codes` with `code: Level` written as `code: {level: Level}`; anything else stays for the check."""
    if not isinstance(codes, dict):
        return codes
    return {code: {"level": rule} if isinstance(rule, str) else rule for code, rule in codes.items()}


def with_codes_spelled_out(tree: Any) -> Any:
    """Return the tree of a policy with `faults.codes` spelled out; anything else stays for the check."""
    faults = tree.get("faults") if isinstance(tree, dict) else None
    if not isinstance(faults, dict) or "codes" not in faults:
        return tree
    return {**tree, "faults": {**faults, "codes": spelled_out(faults["codes"])}}


def _level_lists(tree: Any) -> dict[str, Any]:
    """Return the `<Level>Codes` of a cluster's own file; empty when it is none."""
    if not isinstance(tree, dict):
        return {}
    for nested in _NESTED:
        if isinstance(tree.get(nested), dict):
            tree = tree[nested]
    return {name: listed for name, listed in tree.items() if isinstance(name, str) and name.endswith(_LISTS)}


def _from_lists(lists: dict[str, Any], source: str) -> dict[str, CodeRule]:
    codes: dict[str, CodeRule] = {}
    problems = []
    for name, listed in lists.items():
        level = _level_of(name.removesuffix(_LISTS))
        if level is None:
            problems.append(
                Problem(name, f"names no level; allowed: {', '.join(f'{each}{_LISTS}' for each in LevelName)}")
            )
        elif not isinstance(listed, list) or not all(isinstance(code, str) for code in listed):
            problems.append(Problem(name, "allowed: a list of codes, each in quotes"))
        else:
            codes.update({code: CodeRule(level) for code in listed})
    refuse(problems, source)
    return codes


def _level_of(name: str) -> LevelName | None:
    return LevelName(name) if name in list(LevelName) else None
