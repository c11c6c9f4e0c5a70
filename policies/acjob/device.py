"""What the ranks of an AscendJob compute on: NPUs, where its pods ask for them.

Then device, communicator and the times that NPUs need are those of `configs/npu.yaml`, the policy that comes along. A
job that asks for none computes on CPUs.
"""

from functools import cache
from importlib import resources

import msgspec

from ..files import parse_policy
from ..schema import Policy, default_policy
from .settings import AscendJob

FILE = "npu.yaml"
_SECTIONS = ("communicator", "deadlines", "stall")


@cache
def npu_policy() -> Policy:
    """Return the policy for NPUs that comes along."""
    return parse_policy(resources.files("midstep.configs").joinpath(FILE).read_text(), FILE)


def base_policy(job: AscendJob) -> tuple[Policy, dict[str, str]]:
    """Return the policy that the job's own settings change, and where each key of it comes from."""
    plain = default_policy()
    if not job.ranks_per_node:
        return plain, {}
    ours = npu_policy()
    sections = {name: getattr(ours, name) for name in _SECTIONS}
    origins = {"device": f"its pods ask for {job.ranks_per_node} NPUs each"}
    for name, section in sections.items():
        for key in section.__struct_fields__:
            if getattr(section, key) != getattr(getattr(plain, name), key):
                origins[f"{name}.{key}"] = f"as NPUs need it, see configs/{FILE}"
    return msgspec.structs.replace(plain, device=ours.device, **sections), origins
