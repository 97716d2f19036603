from __future__ import annotations

from pathlib import Path

import aiohttp

from echo_hub.actions.records import Actor
from echo_hub.actions.requests import BlockTenant, MakeToken
from echo_hub.actions.tenant_keys import tinker_key
from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.access.api_tokens import hash_of, new_api_token
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_hub.store.actions import note_action
from echo_hub.store.store import Store
from tests.echo_hub.serving.test_tenants import CONFIG


async def test_a_restarted_hub_knows_tokens_and_blocks_before_its_first_answer(tmp_path: Path) -> None:
    """A client that asks in the first moment must not hear that its token is invalid: it would give up."""
    config, directory, secret = HubConfig.model_validate(CONFIG), RunDirectory(tmp_path / "run"), new_api_token()
    make_run(directory, config)
    store, by = Store.open(directory.database_url), Actor(via="cli", who="ada")
    for name, token in (("Ada", secret), ("Eve", other := new_api_token())):
        store.write(note_action, MakeToken(name=name, scope="use"), by, 1e10, secret_hash=hash_of(token))
    store.write(note_action, BlockTenant(tenant="Eve"), by, 1e10)
    store.close()
    async with open_hub(config, directory) as hub, aiohttp.ClientSession(hub.url) as http:  # `serve` was not called.
        for given, status in ((secret, 200), (other, 403), (new_api_token(), 401)):
            headers = {"X-API-Key": tinker_key(given)}
            async with http.get("/tinker/api/v1/get_server_capabilities", headers=headers) as answer:
                assert answer.status == status, await answer.text()
