from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_hub.store.tenant_records import (
    FAILED,
    RequestEnded,
    RequestRow,
    SessionRow,
    TenantTallied,
    write_tenant_records,
)
from echo_hub.tenants.outcomes import Failed
from echo_hub.tenants.quotas import day_of
from echo_hub.tenants.stored import pack_stored


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    flags = {"server": {"port": 8710}, "openai": {"enabled": True}, "tenants": {"tokens_per_day": 70}}
    make_run(RunDirectory(tmp_path / "run"), load_config(None, flags))
    Store.open(RunDirectory(tmp_path / "run").database_url).close()
    return tmp_path / "run"


def test_tenants_are_listed_limited_and_blocked(run: Path) -> None:
    assert "Ada" not in said("tenants", run)
    said("act", run, "token", "Ada [red]", "use")
    now = time.time()
    ids: dict[str, Any] = {"tenant_id": "Ada [red]", "session_id": "s"}
    failed = pack_stored(Failed(error="The prompt\nis too long.", category="user"))
    store = Store.open(RunDirectory(run).database_url)
    store.write(
        write_tenant_records,
        [
            SessionRow(**ids, about={}, made_at=now),
            RequestRow(**ids, request_id="r", owner_id="s:sample:0", seq_id=0, kind="sample", made_at=now),
            RequestEnded(request_id="r", state=FAILED, outcome=failed, ended_at=now, end_number=1),
            TenantTallied(tenant_id="Ada [red]", day=day_of(now), requests=3, prompt_tokens=20, drawn_tokens=21),
        ],
    )
    store.close()
    listed = said("tenants", run)
    assert re.search(r"Ada \[red\] +until .* +1 +0 +0 +3 +41 +70 +41 +0", listed)
    assert "sample failed: The prompt is too long." in listed
    said("act", run, "tenant_quota", "Ada [red]", "500")
    said("act", run, "block_tenant", "Ada [red]")
    assert re.search(r"Ada \[red\] +blocked since .* +41 +500, its own", said("tenants", run))
    told = json.loads(said("tenants", run, "--json"))
    (ada,) = told["tenants"]
    assert (ada["tokens_today"], ada["tokens_per_day"], ada["has_own_quota"]) == (41, 500, True)
    assert ada["blocked_at"] == pytest.approx(now, abs=60) and told["failures"][0]["category"] == "user"
    assert "tenant_quota" in said("audit", run) and "block_tenant" in said("audit", run)
