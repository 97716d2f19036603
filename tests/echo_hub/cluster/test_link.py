"""The hub's link to a Ray cluster, with a stub for the cluster; tests/echo_hub/scoring/test_processes_ray.py uses a
real one.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from echo_hub.cluster.link import RayLink
from echo_hub.cluster.parcel import Parcel
from echo_hub.config.scoring_sections import RayConfig
from echo_shared.errors import ConfigError


async def opened(tmp_path: Path, address: str) -> None:
    async with RayLink.open(RayConfig(address=address), {"scorer": Parcel()}, owner="run", logs=tmp_path):
        raise AssertionError("there is no cluster")


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
async def test_an_address_without_a_cluster_is_reported_with_advice(tmp_path: Path, form: str) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConfigError, match="No Ray cluster can be reached") as caught:
        await opened(tmp_path, address)
    assert address in str(caught.value.got)
    assert "ray start --head" in str(caught.value.do)
    assert not (tmp_path / "ray.log").exists(), "Ray itself was not called"


async def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ConfigError, match="Ray is not installed"):
        await opened(tmp_path, "auto")
