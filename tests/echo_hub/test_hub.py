"""The whole hub in this process, its port open: what only the wiring can get wrong. tests/end_to_end has whole runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from echo_hub.config.sections import EvaluationConfig, HubConfig, LearnerConfig, RunConfig, ServerConfig, TrainingConfig
from echo_hub.hub import install_command, windows_install_command
from echo_hub.main import make_run
from echo_hub.net.server import Server
from echo_hub.opening import open_hub
from echo_hub.run.directory import RunDirectory


def settings(**sections: object) -> HubConfig:
    return HubConfig.model_validate(
        {
            "run": RunConfig(mode="colocated"),
            "training": TrainingConfig(steps=2, groups_per_step=2, group_size=2, lora_rank=2),
            "evaluation": EvaluationConfig(problems=2),
            "learner": LearnerConfig(threads=1),
            "server": ServerConfig(port=0),
            **sections,
        }
    )


async def test_a_colocated_run_goes_from_its_start_to_its_end(tmp_path: Path) -> None:
    config, directory = settings(), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    async with open_hub(config, directory) as hub:
        assert hub.join_command == f"echo-node join {hub.url}"
        serving = asyncio.create_task(hub.serve())
        finished = asyncio.create_task(hub.ending.finished.wait())
        async with asyncio.timeout(120):
            await asyncio.wait([serving, finished], return_when=asyncio.FIRST_COMPLETED)
        assert finished.done(), serving.exception()
        view = await hub.pages.run_view()
        assert (view.trained_step, view.published_version) == (2, 2)
        assert [evaluation.greedy.policy_version for evaluation in view.evaluations] == [0, 2]
        async with aiohttp.ClientSession() as http, http.get(f"{hub.url}/healthz") as answer:
            assert answer.status == 200
        serving.cancel()
        await asyncio.wait([serving])


def test_the_line_that_installs_is_shown_where_it_is_offered(tmp_path: Path) -> None:
    for join, token in (("open", ""), ("invite", "oken TOKEN")):
        server = ServerConfig.model_validate({"public_url": "https://hub.example/", "join": join})
        assert install_command(HubConfig(server=server), Server(server)) == ""
        assert windows_install_command(HubConfig(server=server), Server(server)) == ""
        server = server.model_copy(update={"install_from": str(tmp_path)})
        assert install_command(HubConfig(server=server), Server(server)) == (
            f"curl -fsSL https://hub.example/install.sh | sh -s -- --join https://hub.example{token and f' --t{token}'}"
        )
        (tmp_path / "install.ps1").unlink(missing_ok=True)
        assert windows_install_command(HubConfig(server=server), Server(server)) == ""
        (tmp_path / "install.ps1").touch()
        assert windows_install_command(HubConfig(server=server), Server(server)) == (
            "& ([scriptblock]::Create((irm https://hub.example/install.ps1)))"
            f" -Join https://hub.example{token and f' -T{token}'}"
        )
