"""Play, until it is killed: API TOKEN."""

import asyncio
import sys

from .api import Api
from .operator import Operator
from .services import ServiceProxy
from .volcano import Volcano

_ROUND_S = 0.3


async def main(server: str, token: str) -> None:
    """Let both look at the cluster in turn, and connections through meanwhile."""
    api, remaining = Api(server, token), dict[str, int]()
    operator, volcano, proxy = Operator(api, remaining), Volcano(api, remaining), ServiceProxy(api)
    while True:
        try:
            await asyncio.to_thread(volcano.session)
            await asyncio.to_thread(operator.reconcile)
            await proxy.look()
        except OSError as error:
            print(error, flush=True)
        await asyncio.sleep(_ROUND_S)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
