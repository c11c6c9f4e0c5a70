"""Hosts the `ray` platform of one job, as the controller's actor does. `platform_host.py OPTIONS`, a JSON object."""

import asyncio
import logging
import sys

import msgspec
import ray

from midstep.platforms.ray.cluster import NAMESPACE
from midstep.platforms.ray.platform import RayOptions, RayPlatform


async def host(options: RayOptions) -> None:
    """Serve the job to its end, and take away what is left."""
    over = asyncio.Event()
    platform = RayPlatform(options, on_end=lambda _: over.set())
    await platform.open()
    await over.wait()
    await platform.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False)  # where the group is found again by its name
    asyncio.run(host(msgspec.json.decode(sys.argv[1], type=RayOptions)))
