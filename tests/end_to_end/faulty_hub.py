"""A hub process whose tracker can be made to refuse every request."""

from __future__ import annotations

from aiohttp import web

from benchmarks.dissemination.hub_host import HubHost, main


class FaultyHub(HubHost):
    async def silence_tracker(self, side: str) -> None:
        def silent(*_: object, **__: object) -> None:
            raise web.HTTPServiceUnavailable

        vars(self._hubs[side]._tracker)["announce"] = silent

    async def swarm_port(self, side: str) -> int:
        return self._hubs[side].swarm_port


if __name__ == "__main__":
    main(FaultyHub)
